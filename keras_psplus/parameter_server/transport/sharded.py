"""One variable whose rows lie on several parameter servers.

TensorFlow's own `ShardedVariable` is a list of variables to Keras 3: it has no handle for the tape,
and an optimizer cannot make slots for it. This one is a single variable to both; the rows that a
lookup needs are gathered on their servers, and an update runs on each shard's server.
"""

from typing import Any

import tensorflow as tf

from keras_psplus.core.base.threads import ThreadValue
from keras_psplus.parameter_server.transport import pulls
from keras_psplus.tf_internals.composite_variable import WrittenVariable

# While an update runs shard by shard: the number of the shard that sharded variables are.
current_shard: ThreadValue[int] = ThreadValue()


class ShardParts(tuple[Any, ...]):
    """An update's argument that is in parts already, one for each shard."""


class ShardedVariable(WrittenVariable):
    """A variable split along axis 0 over parameter servers, from TensorFlow's own one."""

    def __init__(self, sharded: Any) -> None:
        self._sharded = sharded
        self.shards = sharded.variables
        self.offsets = [offset[0] for offset in sharded._var_offsets]
        first = self.shards[0]
        self.keras_path = getattr(first, "keras_path", None)
        super().__init__(
            first.trainable,
            sharded.shape,
            sharded.dtype,
            sharded._unique_id,
            first.name.split("/part_")[0],
        )

    def _shard(self) -> tf.Variable | None:
        index = current_shard()
        return None if index is None else self.shards[index]

    def _shard_or_first(self) -> tf.Variable:
        return self.shards[current_shard() or 0]

    @property
    def handle(self) -> tf.Tensor:
        # What the tape knows the variable by.
        return self._shard_or_first().handle

    @property
    def device(self) -> str:
        return self._shard_or_first().device

    @property
    def shape(self) -> tf.TensorShape:
        shard = self._shard()
        return self._whole_shape if shard is None else shard.shape

    def value(self) -> tf.Tensor:
        """The whole value, or the shard's while `current_shard` is one."""
        shard = self._shard()
        if shard is not None:
            return shard.value()
        self._refuse_inner_functions()
        pulled = pulls.current_pulls() or pulls.Pulls()
        # The tape knows the first handle only: a conditional's or a loop's gradient goes to what
        # its body captures, which has to be the value and not the shards' handles.
        return pulls.as_read(self, pulled.value(self, self.shards, needs_function=True))

    def _refuse_inner_functions(self) -> None:
        # A tape around the function would see shards only, not the variable that they are of.
        if pulls.is_in_inner_function():
            raise ValueError(
                "A variable that is sharded over parameter servers cannot be read inside a "
                "tf.function that the step calls: take the decorator off (`fit` compiles the whole "
                "step), or pass `variable_partitioner=None` to the strategy to keep variables "
                f"whole. Received: {self._handle_name}, shape={self._whole_shape}"
            )

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers rows on the servers that have them; repeated rows are sent once."""
        shard = self._shard()
        if shard is not None:
            return shard.sparse_read(indices)
        self._refuse_inner_functions()
        return pulls.as_read(self, pulls.lookup(self, self._whole_shape, indices, self._rows))

    def _rows(self, unique: tf.Tensor) -> tf.Tensor:
        of_shards, owners = self._decompose(unique)
        places = tf.dynamic_partition(tf.range(tf.size(unique)), owners, len(self.shards))
        pulled = pulls.current_pulls()
        compressor = None if pulled is None else pulled.compressor_of(self)
        key = pulls.key_of(self, compressor)
        rows = [
            pulls.gather(part, own, compressor, key) for part, own in zip(self.shards, of_shards)
        ]
        return tf.dynamic_stitch(places, rows)

    def _decompose(self, indices: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Splits row numbers by shard, and returns the shard of each.

        TensorFlow's method supports shards of equal sizes only.
        """
        starts = tf.constant(self.offsets[1:], indices.dtype)
        owners = tf.searchsorted(starts, indices, side="right")
        first = tf.gather(tf.constant(self.offsets, indices.dtype), owners)
        # What is out of range belongs to the first or the last shard, which says so.
        return tf.dynamic_partition(indices - first, owners, len(self.shards)), owners

    def _decompose_slices(self, slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
        """Rows' gradients, or values, by shard."""
        of_shards, owners = self._decompose(slices.indices)
        values = tf.dynamic_partition(slices.values, owners, len(self.shards))
        return [
            tf.IndexedSlices(own, indices, tf.constant(part.shape.as_list(), indices.dtype))
            for own, indices, part in zip(values, of_shards, self.shards)
        ]

    def _write(self, method: str, value: Any) -> Any:
        shard = self._shard()
        if shard is not None:
            return getattr(shard, method)(value)
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        for part, first in zip(self.shards, self.offsets):
            getattr(part, method)(value[first : first + part.shape[0]])
        return self

    def _scatter(self, method: str, slices: tf.IndexedSlices) -> Any:
        shard = self._shard()
        if shard is not None:
            return getattr(shard, method)(slices)
        for part, own in zip(self.shards, self._decompose_slices(slices)):
            getattr(part, method)(own)
        return self

    def __repr__(self) -> str:
        return f"<ShardedVariable shape={self._whole_shape} shards={len(self.shards)}>"

    def split(self, argument: Any) -> list[Any]:
        """Splits an update's argument (a gradient, a scalar, ...) into one per shard."""
        if isinstance(argument, ShardParts):
            return list(argument)
        if isinstance(argument, tf.IndexedSlices):
            return self._decompose_slices(argument)
        # A gradient may come without a static shape; a learning rate is known to be a scalar.
        if isinstance(argument, tf.Tensor) and argument.shape.is_compatible_with(self._whole_shape):
            argument = tf.ensure_shape(argument, self._whole_shape)
            return [
                argument[first : first + part.shape[0]]
                for part, first in zip(self.shards, self.offsets)
            ]
        if isinstance(argument, tf.Tensor) and argument.shape.rank != 0:
            raise ValueError(
                "An update of a sharded variable takes scalars and tensors of its own shape; pass "
                "`variable_partitioner=None` to the strategy to keep variables whole. "
                f"Received: shape={argument.shape} for {self}"
            )
        return [argument] * len(self.shards)
