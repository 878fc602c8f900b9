"""An embedding of any key, whose table grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import activation
from keras_psplus.arguments import shown, whole_number
from keras_psplus.engine import Call, Engine
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables import policies
from keras_psplus.tables.keys import ZEROS, to_keys
from keras_psplus.tables.local import LocalTable
from keras_psplus.tables.policies import check_cache
from keras_psplus.tables.rounding import BFLOAT16, FLOAT32, check_dtype
from keras_psplus.tables.row_optimizer import check_constraint, check_regularizer
from keras_psplus.tables.row_variable import KeyedVariable, is_keyed
from keras_psplus.tables.snapshot import Contents, Snapshot

COMBINERS = "sum", "mean", "sqrtn"


def combine(
    combiner: str | None,
    ids: Any,
    weights: Any,
    lookup: Callable[[tf.Tensor], tf.Tensor],
    dim: int,
    name: str,
) -> Any:
    """Looks ids up, and combines the rows of each group of them.

    Args:
        combiner: One of `COMBINERS`, or None.
        ids: Dense, ragged or sparse tensor.
        weights: The rows' weights, in the same form, or None.
        lookup: Function from a tensor of ids to a matrix of rows.
        name: Name of the layer, for messages.

    Raises:
        ValueError: If ids of this form cannot be combined so.
    """
    if combiner is None:
        return _each(ids, weights, lookup, dim, name)
    if not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        if ids.shape.rank == 0:
            raise ValueError(
                f"The layer '{name}' combines the rows of the last axis of its ids, and there is "
                f"none. Received: ids of shape {ids.shape}"
            )
        rows = tf.reshape(lookup(ids), tf.concat([tf.shape(ids), [dim]], 0))
        return _dense(combiner, tf.ensure_shape(rows, [*ids.shape, dim]), weights)
    if isinstance(ids, tf.SparseTensor):
        groups, count, shape = _groups_of_sparse(ids)
        static = ids.shape[:-1]
        values = weights.values if isinstance(weights, tf.SparseTensor) else weights
        flat = ids.values
    else:
        *outer, splits = ids.nested_row_splits
        flat, groups = ids.flat_values, tf.ragged.row_splits_to_segment_ids(splits)
        count = tf.size(splits, splits.dtype) - 1
        values = weights.flat_values if isinstance(weights, tf.RaggedTensor) else weights
        if outer:
            rows = _segments(combiner, lookup(flat), values, groups, count)
            return tf.RaggedTensor.from_nested_row_splits(rows, outer, validate=False)
        shape, static = count[tf.newaxis], ids.shape[:1]
    rows = _segments(combiner, lookup(flat), values, groups, count)
    rows = tf.reshape(rows, tf.concat([shape, tf.constant([dim], shape.dtype)], 0))
    return tf.ensure_shape(rows, [*static, dim])


def _each(
    ids: Any, weights: Any, lookup: Callable[[tf.Tensor], tf.Tensor], dim: int, name: str
) -> Any:
    if isinstance(ids, tf.SparseTensor):
        raise ValueError(
            f"The layer '{name}' needs a combiner for sparse ids, whose gaps have no rows. Give it "
            '`combiner="sum"`, "mean" or "sqrtn". Received: combiner=None'
        )
    if weights is not None:
        raise ValueError(
            f"The layer '{name}' uses weights where it combines rows: give it a combiner. "
            "Received: weights with combiner=None"
        )
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(lookup(ids.flat_values))
    rows = tf.reshape(lookup(ids), tf.concat([tf.shape(ids), [dim]], 0))
    return tf.ensure_shape(rows, [*ids.shape, dim])


def _dense(combiner: str, rows: tf.Tensor, weights: Any) -> tf.Tensor:
    if weights is None:
        total, count = tf.reduce_sum(rows, -2), tf.cast(tf.shape(rows)[-2], rows.dtype)
        if combiner == "sum":
            return total
        static = rows.shape[-2]
        by = count if combiner == "mean" else tf.sqrt(count)
        if static:
            by = tf.constant(static if combiner == "mean" else math.sqrt(static), rows.dtype)
        return tf.math.divide_no_nan(total, by)
    weights = tf.cast(weights, rows.dtype)
    total = tf.reduce_sum(rows * weights[..., tf.newaxis], -2)
    return _divided(combiner, total, lambda w: tf.reduce_sum(w, -1, keepdims=True), weights)


def _segments(
    combiner: str, rows: tf.Tensor, weights: Any, groups: tf.Tensor, count: tf.Tensor
) -> tf.Tensor:
    if weights is None:
        weights = tf.ones([tf.shape(rows)[0]], rows.dtype)
    else:
        weights = tf.cast(weights, rows.dtype)
        rows = rows * weights[:, tf.newaxis]

    def total_of(values: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(values, groups, count)

    return _divided(combiner, total_of(rows), lambda w: total_of(w)[:, tf.newaxis], weights)


def _divided(
    combiner: str, total: tf.Tensor, total_of: Callable[[tf.Tensor], tf.Tensor], weights: tf.Tensor
) -> tf.Tensor:
    if combiner == "sum":
        return total
    by = total_of(weights) if combiner == "mean" else tf.sqrt(total_of(tf.square(weights)))
    return tf.math.divide_no_nan(total, by)


def _groups_of_sparse(ids: tf.SparseTensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The group of each value, the number of groups, and the shape that they have."""
    shape = ids.dense_shape[:-1]
    strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
    groups = tf.reduce_sum(ids.indices[:, :-1] * strides, 1)
    return groups, tf.reduce_prod(shape), shape


def _without(
    ids: Any, weights: Any, is_padding: Callable[[tf.Tensor], tf.Tensor], has_combiner: bool
) -> tuple[Any, Any]:
    """Ids and weights of which padding is cut out, or, of dense ids, weighs nothing."""
    if isinstance(ids, tf.SparseTensor):
        kept = ~is_padding(ids.values)
        if isinstance(weights, tf.SparseTensor):
            weights = tf.sparse.retain(weights, kept)
        elif weights is not None:
            weights = tf.boolean_mask(weights, kept)
        return tf.sparse.retain(ids, kept), weights
    if isinstance(ids, tf.RaggedTensor):
        kept = ids.with_flat_values(~is_padding(ids.flat_values))
        if weights is not None and not isinstance(weights, tf.RaggedTensor):
            weights = ids.with_flat_values(tf.convert_to_tensor(weights))
        weights = None if weights is None else tf.ragged.boolean_mask(weights, kept)
        return tf.ragged.boolean_mask(ids, kept), weights
    if not has_combiner:
        return ids, weights
    kept = tf.cast(~is_padding(ids), tf.float32)
    return ids, kept if weights is None else kept * tf.cast(weights, tf.float32)


@keras.saving.register_keras_serializable(package="keras_psplus")
class PaddingMask(keras.Operation):
    """Mask of dense ids: False where they are padding.

    Keras has it beside the layer in the graph of a functional model.

    Args:
        has_groups: Whether it is of groups along the last axis.
        name: Name of the layer, and `_mask`.
    """

    def __init__(self, mask_value: int | str, has_groups: bool, *, name: str) -> None:
        super().__init__(name=name)
        self.mask_value, self.has_groups = mask_value, has_groups

    def is_padding(self, ids: tf.Tensor) -> tf.Tensor:
        layer = self.name.removesuffix("_mask")
        if (ids.dtype == tf.string) != isinstance(self.mask_value, str):
            raise ValueError(
                f"The layer '{layer}' has a `mask_value` of another type than its ids: give an int "
                "for integers, and a str for strings. Received: mask_value="
                f"{shown(self.mask_value)} with ids of type {ids.dtype.name}"
            )
        return tf.equal(ids if ids.dtype == tf.string else to_keys(ids, layer), self.mask_value)

    def call(self, ids: Any) -> tf.Tensor:
        is_there = ~self.is_padding(tf.convert_to_tensor(ids))
        return tf.reduce_any(is_there, -1) if self.has_groups else is_there

    def compute_output_spec(self, ids: Any) -> keras.KerasTensor:
        return keras.KerasTensor(ids.shape[:-1] if self.has_groups else ids.shape, "bool")


_DEFAULTS = ZEROS, "initializer"
# Arguments of other embeddings, and what there is in their place.
_INSTEAD = {
    "embeddings_initializer": "its argument is `initializer=`",
    "input_dim": "its table grows with the ids; `expire=psp.tables.Capacity(rows)` bounds it",
    "lora_rank": "all of a row is trained",
    "mask_zero": "give the id that pads sequences, `mask_value=0`",
    "max_norm": "use `embeddings_constraint=keras.constraints.MaxNorm(norm, axis=1)`",
    "output_dim": "its argument is `dim`",
}


@keras.saving.register_keras_serializable(package="keras_psplus")
class DynamicEmbedding(keras.layers.Layer):
    """Turns any integers or strings into rows of a growing table.

    The first step that trains with a key makes its row, which is a function of the key and of the
    initializer's seed alone. `evaluate`, `predict` and calls outside of training make nothing.
    Without a strategy, the table is in this process's memory; under `HybridStrategy` and
    `ParameterServerStrategy`, on parameter servers, with the same rows. Strings are known by
    fingerprints of 64 bits.

    Args:
        dim: Numbers in a row.
        admit: Which keys get a row: `tables.Count`, `tables.Bloom`, `tables.Probability`, or None
            for all.
        expire: Which rows are dropped: `tables.Unused`, `tables.Capacity`, `tables.Norm`, several
            of them joined by `|`, or None for none.
        combiner: `"sum"`, `"mean"` or `"sqrtn"` of the rows along the last axis of the ids, or None
            for each row by itself.
        initializer: Of rows: a Keras initializer such as `RandomUniform`, `RandomNormal`,
            `TruncatedNormal`, `Constant`, or its name.
        default: What a key without a row is: `"zeros"`, or `"initializer"` for the row that it
            would begin with.
        cache: `tables.Cache` of the hottest rows on each worker of `HybridStrategy`, or None.
        mask_value: Id that pads sequences, such as 0, or `""` of strings, or None. It has no row,
            combiners leave it out, and the output has a Keras mask of dense ids: of each of them,
            or of each group along the last axis that is combined, if there are several axes.
        embeddings_regularizer: Regularizer of the rows of a step's distinct ids, with the updates;
            its penalty is not in the loss.
        embeddings_constraint: Constraint of rows, from their beginning on, which takes each by
            itself, as `keras.constraints.MaxNorm(2.0, axis=1)` does.
        rows_dtype: `"float32"`, or `"bfloat16"` for rows in half of the memory, which updates round
            at random; None for what the policy `dtype` has variables in.
        slots_dtype: The same of the optimizer's variables of rows.
        **kwargs: As for `keras.layers.Layer`, such as `name`, and the policy `dtype`: rows are in
            bfloat16 under `"bfloat16"`, and in float32 under `"mixed_bfloat16"`.

    Raises:
        ValueError: If an argument is none of these.

    Example:

    ```python
    table = keras_psplus.layers.DynamicEmbedding(
        32,
        admit=keras_psplus.tables.Count(3),
        expire=keras_psplus.tables.Unused(days=7) | keras_psplus.tables.Capacity(50_000_000),
        combiner="mean",
    )
    ids = keras.Input((None,), dtype="int64", ragged=True)
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    ```
    """

    def __init__(
        self,
        dim: int,
        *,
        admit: Any = None,
        expire: Any = None,
        combiner: str | None = None,
        initializer: Any = "uniform",
        default: str = ZEROS,
        cache: Any = None,
        mask_value: int | str | None = None,
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        rows_dtype: str | None = None,
        slots_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        activation.activate()
        for name in [name for name in _INSTEAD if name in kwargs]:
            raise ValueError(
                f"A DynamicEmbedding has no `{name}`: {_INSTEAD[name]}. "
                f"Received: {name}={shown(kwargs[name])}"
            )
        super().__init__(**kwargs)
        self.dim = whole_number("dim", dim, 1, most=2**20)
        self._admit, self._expire = policies.check_admit(admit), policies.check_expire(expire)
        self._initializer = initial_rows.check_initializer(initializer)
        self._cache = check_cache(cache)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        check_constraint(keras.constraints.serialize(self.embeddings_constraint), self.dim)
        check_regularizer(self.embeddings_regularizer)
        if rows_dtype is None:
            rows_dtype = BFLOAT16 if self.variable_dtype == BFLOAT16 else FLOAT32
        self.rows_dtype = check_dtype("rows_dtype", rows_dtype)
        self.slots_dtype = check_dtype("slots_dtype", slots_dtype)
        self.combiner, self.default, self.mask_value = combiner, default, mask_value
        if mask_value is not None and not isinstance(mask_value, str):
            whole_number("mask_value", mask_value, -(2**63), most=2**63 - 1)
        self._mask: PaddingMask | None = None
        if mask_value is not None:
            self.supports_masking = True
            self._mask = PaddingMask(mask_value, combiner is not None, name=f"{self.name}_mask")
        if combiner not in (None, *COMBINERS):
            raise ValueError(
                '`combiner` must be "sum", "mean", "sqrtn" or None. '
                f"Received: combiner={shown(combiner)}"
            )
        if default not in _DEFAULTS:
            raise ValueError(
                f'`default` must be "zeros" or "initializer". Received: default={shown(default)}'
            )
        # Ids are no features, which Keras would cast.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.supports_jit = False
        self.table: KeyedVariable | None = None
        # Its `TableConfig` of KerasRS.
        self.keras_rs_config: Any = None

    def build(self, input_shape: Any = None) -> None:
        """Makes the table.

        Args:
            input_shape: Shape of the ids, whatever it is.
        """
        if self.table is None:
            self.table = KeyedVariable(self._make_table, self.dim, "table", self.trainable)
        self.built = True

    def _make_table(self, variable: KeyedVariable) -> Any:
        spec = {
            "kind": "dynamic",
            "name": variable.path,
            "dim": self.dim,
            "initializer": self._initializer,
            "default": self.default,
            "admit": self._admit,
            "expire": self._expire,
            "constraint": keras.constraints.serialize(self.embeddings_constraint),
            "regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "rows_dtype": self.rows_dtype,
            "slots_dtype": self.slots_dtype,
            **({} if self._cache is None else {"cache": self._cache}),
        }

        def in_memory(_: Any, spec: dict[str, Any]) -> LocalTable:
            return LocalTable(spec, self.trainable)

        strategy = tf.distribute.get_strategy()
        engine: Engine | None = getattr(strategy, "engine", None)
        if engine is None:
            if tf.distribute.has_strategy():
                raise ValueError(
                    "A table in the memory of one process cannot be trained under a strategy of "
                    "TensorFlow's. Use keras_psplus.HybridStrategy, or no strategy. "
                    f"Received: {type(strategy).__name__}"
                )
            return in_memory(variable, spec)
        call = Call(in_memory, variable, (spec,), {}, "make_table", engine, ["spec"])
        return engine.make_variable(call)

    def call(self, ids: Any, weights: Any = None, training: bool | None = False) -> Any:
        """Looks rows up.

        Args:
            ids: Integers or strings: a dense, ragged or sparse tensor.
            weights: Floats in the form of `ids`, by which rows are multiplied before a combiner
                adds them up; 1 by default.
            training: Whether a step trains with them.
        """
        assert self.table is not None
        table, trains = self.table._value, bool(training and self.trainable)
        if not isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
            ids = tf.convert_to_tensor(ids)

        def lookup(flat: tf.Tensor) -> tf.Tensor:
            keys = tf.reshape(to_keys(flat, self.name), [-1])
            if table is None:
                # It is made once Keras has called the model for its shapes.
                return tf.zeros([tf.size(keys), self.dim], self.compute_dtype)
            if self._mask is None:
                return tf.cast(table.lookup_keys(keys, trains), self.compute_dtype)
            places = tf.where(~self._mask.is_padding(tf.reshape(flat, [-1])))
            rows = table.lookup_keys(tf.gather_nd(keys, places), trains)
            shape = tf.stack([tf.size(keys, places.dtype), self.dim])
            return tf.cast(tf.scatter_nd(places, rows, shape), self.compute_dtype)

        if self._mask is not None:
            ids, weights = _without(ids, weights, self._mask.is_padding, self.combiner is not None)
        return combine(self.combiner, ids, weights, lookup, self.dim, self.name)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Mask of the output: False where ids are padding.

        Args:
            inputs: Ids.
            previous_mask: Not used.
        """
        is_dense = not isinstance(inputs, (tf.SparseTensor, tf.RaggedTensor))
        if self._mask is None or not is_dense or getattr(inputs, "ragged", False):
            return None
        return self._mask(inputs) if self.combiner is None or len(inputs.shape) > 2 else None

    def compute_output_shape(self, input_shape: Any, weights_shape: Any = None) -> tuple[Any, ...]:
        """Shape of the output for ids of a shape.

        Args:
            input_shape: Shape of the ids.
            weights_shape: Shape of their weights.
        """
        kept: Sequence[Any] = input_shape if self.combiner is None else input_shape[:-1]
        return (*kept, self.dim)

    def compute_output_spec(self, ids: Any, weights: Any = None, training: Any = False) -> Any:
        """Specification of the output for that of ids.

        Args:
            ids: `KerasTensor`.
            weights: `KerasTensor` of their weights, or None.
            training: As for `call`.
        """
        shape = self.compute_output_shape(ids.shape)
        ragged = self.combiner is None and bool(getattr(ids, "ragged", False))
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=ragged)

    # Contents.

    @property
    def keys(self) -> Any:
        """int64 array of the keys that have a row, sorted."""
        return self._snapshot().keys

    def counts(self) -> tuple[Any, Any]:
        """Frequency and last step of each row, in the order of `keys`.

        Returns:
            Two int64 arrays: the number of updates in which the key was, and the last one's number.
        """
        entries = self._snapshot().entries
        return entries[:, 1], entries[:, 2]

    def _snapshot(self) -> Snapshot:
        return self._own_value.read_snapshot()

    @property
    def _own_value(self) -> Any:
        if self.table is None or not is_keyed(self.table):
            raise ValueError(
                f"The layer '{self.name}' has no table before it is built. Call it, or its model, "
                "first. Received: a layer that is not built"
            )
        return self.table._value

    def items(self, batch: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Stream of keys and rows, in no order, for tables of any size.

        Args:
            batch: The most keys at a time.

        Returns:
            Iterator over pairs of an int64 vector and a float32 matrix.
        """
        return self._own_value.read_items(whole_number("batch", batch, 1))

    def insert(
        self, keys: Any, rows: Any, slots: Sequence[Any] | None = None, counts: Any = None
    ) -> None:
        """Sets rows of keys, which it makes where there are none, whatever `admit` says.

        Call it while nothing trains; of a job's workers, all do, and the chief's arrays count.

        Args:
            keys: Vector of distinct integers or strings.
            rows: Matrix with a row for each key.
            slots: As `rows`, for each variable that the optimizer has of the table, in its order;
                None for those that new keys begin with, and keys that are there have.
            counts: In how many updates each key was; None for 1, or as many as there were.

        Raises:
            ValueError: If the arrays do not fit, or something trains.

        Example:

        ```python
        for keys, rows in other.items():
            table.insert(keys, rows)
        ```
        """
        value, keys = self._own_value, self._keys_of(keys)
        numbers = () if slots is None else value.slot_numbers
        columns = [np.asarray(one, np.float32) for one in (rows, *(slots or ()))]
        times = np.asarray(np.zeros(len(keys)) if counts is None else counts, np.int64)
        shapes = [one.shape for one in columns], times.shape
        if shapes != ([(len(keys), self.dim)] * (1 + len(numbers)), keys.shape) or (
            counts is not None and times.size and times.min() < 1
        ):
            raise ValueError(
                f"The table of '{self.name}' takes rows of {self.dim} numbers, and slots of the "
                f"{len(value.slot_numbers)} variables that its optimizer has of it once it is "
                f"built, one for each of {len(keys)} keys, and counts from 1 up. "
                f"Received: rows and slots of shapes {shapes[0]}, counts of shape {shapes[1]}"
            )
        value.edit(lambda table: table.insert(keys, list(zip((0, *numbers), columns)), times))

    def remove(self, keys: Any) -> None:
        """Removes keys, with their rows, slots and counts; as `insert`, while nothing trains.

        Args:
            keys: Vector of distinct integers or strings; those without a row do not matter.
        """
        value, keys = self._own_value, self._keys_of(keys)
        value.edit(lambda table: table.remove(keys))

    def clear(self) -> None:
        """Removes all keys, and what `admit` has counted; as `insert`, while nothing trains."""
        self._own_value.edit(Contents.clear)

    def _keys_of(self, ids: Any) -> np.ndarray:
        if not tf.executing_eagerly():
            raise ValueError(
                f"The keys of the layer '{self.name}' are changed outside of steps. Call it "
                "outside of tf.function. Received: a call inside of a graph"
            )
        ids = np.asarray(ids)
        # NumPy gives an empty list another type.
        ids = ids if ids.size else ids.astype(np.int64)
        keys = to_keys(tf.convert_to_tensor(ids), self.name).numpy()
        if keys.ndim != 1 or len(np.unique(keys)) < keys.size:
            raise ValueError(
                f"The layer '{self.name}' takes a vector of keys, none of which comes twice. "
                f"Received: keys of shape {keys.shape}, {len(np.unique(keys))} of them distinct"
            )
        return keys

    def save_own_variables(self, store: Any) -> None:
        """Writes the table: its keys and rows, and what policies have counted."""
        # In a backup, its servers have written it.
        if self.table is not None and is_keyed(self.table):
            for name, array in self._snapshot().arrays().items():
                store[name] = array

    def load_own_variables(self, store: Any) -> None:
        """Reads the table.

        Raises:
            ValueError: If the file has another one.
        """
        if self.table is not None and is_keyed(self.table):
            snapshot = Snapshot.of_arrays(
                {name: store[name][()] for name in store.keys()}, self.dim, self.table.path
            )
            self.table._value.write_snapshot(snapshot)

    def get_config(self) -> dict[str, Any]:
        """Configuration of the layer."""
        kind = getattr(keras.initializers, self._initializer["kind"])
        known = {**self._initializer["config"], "seed": self._initializer["seed"]}
        if "seed" not in kind().get_config():
            del known["seed"]
        return {
            **super().get_config(),
            "dim": self.dim,
            "admit": self._admit,
            "expire": self._expire,
            "combiner": self.combiner,
            "initializer": keras.initializers.serialize(kind.from_config(known)),
            "default": self.default,
            "cache": self._cache,
            "mask_value": self.mask_value,
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "rows_dtype": self.rows_dtype,
            "slots_dtype": self.slots_dtype,
        }


# A dynamic table as one of KerasRS's.


class FeatureLookup(keras.layers.Layer):
    """Looks a feature up as `keras_rs.layers.EmbedReduce` does.

    Args:
        table: `DynamicEmbedding` with a combiner, which one id of an example has no use for.
    """

    def __init__(self, table: DynamicEmbedding) -> None:
        super().__init__(name=table.name)
        self.table = table
        # Ids are no features, which Keras would cast.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.supports_jit = False

    def build(self, input_shape: Any = None) -> None:
        """Makes the table, whatever the shape of the ids."""
        if not self.table.built:
            self.table.build(input_shape)
        self.built = True

    def call(self, ids: Any, weights: Any = None, training: bool | None = False) -> Any:
        """Looks rows up, and combines those of each example.

        Args:
            ids: Dense vector of ids, or dense, ragged or sparse matrix.
            weights: As for `DynamicEmbedding`.
        """
        if ids.shape.rank == 1:
            ids = tf.convert_to_tensor(ids)[:, tf.newaxis]
            weights = None if weights is None else tf.convert_to_tensor(weights)[:, tf.newaxis]
        return self.table(ids, weights, training=training)

    @property
    def embeddings(self) -> Any:
        """KerasRS's `get_embedding_tables` asks for a matrix, which there is none of.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"The rows of '{self.name}' have keys, and are no matrix. Read them of the table, a "
            f"DynamicEmbedding, by its `keys` and by calling it. Received: '{self.name}'"
        )
