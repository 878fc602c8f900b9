"""Variables in shares, and parts of mirrored variables in an update."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Cut
from keras_psplus.all_reduce.step.mirrored_variables import WIDER
from keras_psplus.core.base.threads import ThreadFlag
from keras_psplus.sharding.places import PieceCut
from keras_psplus.tf_internals import resource_variable_ops
from keras_psplus.tf_internals.composite_variable import WrittenVariable

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.hop import Route
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.sharding.places import Place
    from keras_psplus.sharding.store import ShareStore

# Of a whole value, on workers that keep only a part of it.
_PIECE_BYTES = 4 << 20
# In an update, variables in shares are their parts; elsewhere they are whole.
in_update = ThreadFlag()


class ShareVariable(WrittenVariable):
    """A variable of which each worker keeps a part; whole outside of updates.

    Its memory is allocated when it is first used: an optimizer has all of its variables by then,
    and it is known whether they can be cut.

    Args:
        initial: Function of its place and the shape of the part; returns the part's first value.
    """

    def __init__(
        self,
        store: ShareStore,
        shape: Any,
        dtype: Any,
        name: str,
        find_place: Callable[[], Place],
        initial: Callable[[Place, tf.TensorShape], Any],
        trainable: bool = False,
    ) -> None:
        self._store = store
        # None once they are no longer needed: they keep other objects alive.
        self._find_place: Callable[[], Place] | None = find_place
        self._initial: Callable[[Place, tf.TensorShape], Any] | None = initial
        self._place: Place | None = None
        self._part: Any = None
        self.number = store.add(
            self, f"shape={tuple(shape)}, dtype={tf.as_dtype(dtype).name}", name
        )
        # Number of values that the script has given it, as by a file that is loaded, and of updates
        # outside of steps.
        self.writes = 0
        unique_id = f"{name}_in_shares_{self.number}"
        super().__init__(trainable, shape, tf.as_dtype(dtype), unique_id, name)

    def release_with(self, variable: keras.Variable) -> None:
        """Frees a worker's part after its Keras variable is gone on all workers."""
        weakref.finalize(variable, self._store.release, self.number).atexit = False

    @property
    def is_placed(self) -> bool:
        """Whether it is known what each worker keeps."""
        return self._place is not None

    @property
    def place(self) -> Place:
        if self._place is None:
            assert self._find_place is not None
            self._place, self._find_place = self._find_place(), None
        return self._place

    @property
    def part(self) -> tf.Variable:
        if self._part is None:
            assert self._initial is not None
            place, rank = self.place, self._store.rank
            shape = place.local_shape(self._whole_shape, rank)
            with tf.init_scope(), tf.device(self._store.device):
                self._part = resource_variable_ops.ResourceVariable(
                    tf.cast(self._initial(place, shape), self.dtype), trainable=False
                )
            self._initial = None
        return self._part

    @property
    def written(self) -> tf.Variable:
        """This worker's part, to be written to."""
        return self.part

    @property
    def handle(self) -> tf.Tensor:
        return self.part.handle

    @property
    def device(self) -> str:
        return self._store.device

    @property
    def shape(self) -> tf.TensorShape:
        return self.part.shape if in_update else self._whole_shape

    def value(self) -> tf.Tensor:
        if in_update or self.place.is_everywhere:
            return self.part.value()
        if tf.executing_eagerly() and not self._store.is_together:
            # One worker may ask alone, as a chief that saves does.
            return self._store.read(self)
        with tf.device(self._store.device):
            return self.gathered(self._store.route)

    def gathered(self, route: Route) -> tf.Tensor:
        """The whole value, by collectives that all workers take part in."""
        place, part = self.place, self.part.value()
        if place.cut is not None:
            row = tf.reshape(part, [1, place.cut.width])
            return place.whole(route.gather(row), self._store.rank)
        mine = place.owner == self._store.rank
        return route.sum([part if mine else tf.zeros(self._whole_shape, self.dtype)])[0]

    def collected(self, route: Route, is_wanted: bool) -> tf.Tensor | None:
        """The whole value, piece by piece, where it is wanted; eagerly, on all workers."""
        cut, part = self.place.cut, self.part.value()
        if cut is None:
            return self.gathered(route)
        rows = None
        if is_wanted:
            rows = np.empty([route.workers, cut.width], self.dtype.as_numpy_dtype)
        row, length = tf.reshape(part, [1, cut.width]), self._piece // route.workers or 1
        for start in range(0, cut.width, length):
            piece = route.gather(row[:, start : start + length])
            if rows is not None:
                rows[:, start : start + length] = piece
        if rows is None:
            return None
        return self.place.whole(tf.convert_to_tensor(rows), self._store.rank)

    def receive(self, launcher: Launcher, value: tf.Tensor | None) -> None:
        """Takes this worker's part of a value that one worker has.

        All workers of the job take part in the collectives; the others give None. Of parts that
        follow each other, they have no more than a piece of the whole in memory.
        """
        wide, rank = WIDER.get(self.dtype, self.dtype), self._store.rank

        def total_of(shape: tf.TensorShape | list[int], own: tf.Tensor | None) -> tf.Tensor:
            sent = tf.zeros(shape, wide) if own is None else tf.cast(own, wide)
            return tf.cast(launcher.all_reduce(sent), self.dtype)

        if not isinstance(self.place.cut, (Cut, PieceCut)):
            part = self.place.local_part(total_of(self._whole_shape, value), rank)
            # A slice shares the buffer of the whole, and would keep it alive.
            self.part.assign(tf.raw_ops.DeepCopy(x=part), read_value=False)
            return
        # Elements, or rows if parts consist of them.
        _, *of_row = self.place.cut.shard
        rows = None if value is None else tf.reshape(self.place.in_order(value), [-1, *of_row])
        first, last = self.place.span(rank)
        size = self._whole_shape.num_elements() // math.prod(of_row)
        most = max(1, self._piece // math.prod(of_row))
        for start in range(0, size, most):
            end = min(size, start + most)
            piece = total_of([end - start, *of_row], None if rows is None else rows[start:end])
            begin, finish = max(first, start), min(last, end)
            if begin < finish:
                tf.raw_ops.ResourceStridedSliceAssign(
                    ref=self.part.handle,
                    begin=[begin - first],
                    end=[finish - first],
                    strides=[1],
                    value=piece[begin - start : finish - start],
                )

    @property
    def _piece(self) -> int:
        """Elements of the whole that workers have in memory at once, for another one's sake."""
        return max(1, _PIECE_BYTES // self.dtype.size)

    def _write(self, method: str, value: Any) -> Any:
        other = getattr(value, "_value", value)
        if isinstance(other, ShareVariable) and other.place == self.place:
            # As of averages: each worker has its part of both.
            value = other.part.read_value()
        elif not in_update or self._is_whole(value):
            value = tf.cast(value, self.dtype)
            if self._store.restoring and tf.executing_eagerly() and method == "assign":
                return self._store.give(self, value)
            value = self.place.local_part(value, self._store.rank)
            if tf.executing_eagerly():
                # A slice shares the buffer of the whole, and would keep it alive.
                value = tf.raw_ops.DeepCopy(x=value)
        if tf.executing_eagerly() and not (in_update or self.place.is_everywhere):
            # Another worker may have to read what is there now: it would get parts of both.
            self._store.meet(f"variable {self.number}", self.name)
        written = getattr(self.written, method)(tf.cast(value, self.dtype), read_value=False)
        if tf.executing_eagerly() and not in_update:
            self.writes += 1
        return written

    def _is_whole(self, value: Any) -> bool:
        """Whether an update gives it a whole, as Keras's zeros for accumulated gradients are."""
        shape = tf.TensorShape(getattr(value, "shape", None))
        return shape.rank is not None and shape == self._whole_shape != self.part.shape

    def _scatter(self, method: str, slices: tf.IndexedSlices) -> Any:
        # Rows of gradients, in an update.
        return getattr(self.written, method)(slices)


def are_in_parts(variables: Sequence[keras.Variable | None]) -> bool:
    """Whether a worker has only a part of one of some variables."""
    values = [variable._value for variable in variables if variable is not None]
    return any(isinstance(v, ShareVariable) and not v.place.is_everywhere for v in values)


def shares_of(variables: Iterable[keras.Variable]) -> list[ShareVariable]:
    """Of some variables, those of which a worker has only a part."""
    return [variable._value for variable in variables if are_in_parts([variable])]


def count_writes(variables: Iterable[ShareVariable]) -> None:
    """Counts an update outside of steps, in which workers may write unequally often."""
    for variable in variables:
        variable.writes += 1


class TensorVariable(WrittenVariable):
    """A tensor that an update changes as a variable, without memory.

    Args:
        mirrored: The variable of TensorFlow's that it stands for.
    """

    def __init__(self, value: tf.Tensor, mirrored: tf.Variable) -> None:
        self._now = value
        # By its id an optimizer finds slots, and by its name what weight decay leaves out.
        name = mirrored.name.removesuffix(":0")  # TensorFlow adds it again.
        super().__init__(True, value.shape, mirrored.dtype, mirrored._unique_id, name)

    @property
    def handle(self) -> tf.Tensor:
        raise AttributeError  # By which optimizers see that it is no variable of TensorFlow's.

    def value(self) -> tf.Tensor:
        return self._now

    def _write(self, method: str, value: Any) -> None:
        value = tf.cast(value, self.dtype)
        if method == "assign_add":
            value = self._now + value
        elif method == "assign_sub":
            value = self._now - value
        self._now = value

    def _scatter(self, method: str, slices: tf.IndexedSlices) -> None:
        scatter = getattr(tf, f"tensor_scatter_nd_{method.removeprefix('scatter_')}")
        self._now = scatter(self._now, slices.indices[:, tf.newaxis], slices.values)


@dataclasses.dataclass(frozen=True)
class PartAlongAxis:
    """A worker's part of a weight along an axis, as a variable of its own."""

    path: str
    shape: tf.TensorShape
    dtype: str
    _value: tf.Variable


def on_worker(variable: keras.Variable) -> keras.Variable | PartAlongAxis:
    """A variable as a worker keeps it: whole, or its part along an axis."""
    value = variable._value
    if not hasattr(value, "local_shape"):
        return variable
    return PartAlongAxis(variable.path, value.local_shape, variable.dtype, value.part)


class ParameterPart(TensorVariable):
    """This worker's part, in an update, of a variable of which others have the same.

    Args:
        place: Its `places.Place` among these workers, which is cut.
    """

    def __init__(self, variable: keras.Variable, place: Place, rank: int) -> None:
        assert isinstance(place.cut, Cut)
        self.variable, self.of, self.cut = variable, on_worker(variable), place.cut
        self.path = variable.path
        self._before = place.local_part(self.of._value.read_value(), rank)
        super().__init__(self._before, variable._value)

    def change(self) -> tf.Tensor:
        """Difference that the update has made so far, in float32."""
        return tf.cast(self.value(), tf.float32) - tf.cast(self._before, tf.float32)
