"""Instance keys of one replica's collectives, counted in the graph, and the lanes they share.

TensorFlow's own `CollectiveReplicaLauncher` feeds a fresh key into every call of a `tf.function`.
That fails inside `tf.while_loop` and `tf.cond` ("You must feed a value for placeholder"), which is
where `steps_per_execution` and gradient accumulation run, and the runtime never frees what it keeps
for a key (about 5 kB for each executed collective).

Here keys are counted in the graph, by an int32 variable per lane and signature, and cycle through a
small window that is private to the signature:

    signature (kind, dtype, shape)     slot    = hash of group and signature
    |- lane 0: window keys 0 1         key     = first key of the slot
    |- lane 1: window keys 2 3                   + first key of the lane in the window
    |- lane 2: window keys 4 5                   + the lane's counter modulo its keys
    `- lane 3: window keys 6 7

TensorFlow also has each collective wait for the one before it to end: the next bucket of gradients
is not sent before the last one is summed, and the link is idle while one of them is encoded or
decoded. Collectives of one signature take turns in the lanes, and only those of one lane wait for
each other, by a variable that all of them are given.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.core.graph.variables import made_outside
from keras_psplus.tf_internals import framework_ops as ops

# A collective of one lane may still be finishing on a slow peer while a fast one starts the next of
# the same lane: keys in turn keep the two apart.
_WINDOW, LANES = 8, 4
# The int32 key space: TensorFlow's own keys end far below 1 << 24.
_UNKNOWN_SHAPE_KEYS = 1 << 24
_STATIC_KEYS, _STATIC_SLOTS = 1 << 29, 1 << 26
_ROWS_KEYS, _ROWS_SLOTS = 1 << 30, 1 << 19
# Rows are padded to one of these counts (eight in each octave, at most 12.5 % of waste), so that
# gathers of ever-changing sizes need a fixed number of keys.
SIZE_CLASSES = 256
_SIZES = sorted({n << k >> 3 for k in range(31) for n in range(8, 16)} - {0})[:SIZE_CLASSES]


class InstanceKeys:
    """Keys of the collectives of one replica in one group.

    Args:
        group_key: The group's key, the same on all its replicas.

    Attributes:
        counters: Dict from names to the int32 variables that count.
    """

    def __init__(self, group_key: int) -> None:
        self._group_key = group_key
        self.counters: dict[Any, tf.Variable] = {}
        self._orders: dict[Any, tf.Variable] = {}
        self._slots: dict[tuple[int, int], str] = {}
        self._launched = weakref.WeakKeyDictionary[tf.Graph, dict[Any, int]]()
        self._signature: tuple[Any, ...] | None = None
        self._lane = 0
        self._size_class: tf.Tensor | None = None
        self._name: str | None = None

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Context whose collectives share keys and lanes with others of the same name only."""
        outer, self._name = self._name, name
        try:
            yield
        finally:
            self._name = outer

    @contextlib.contextmanager
    def of(
        self,
        signature: tuple[Any, ...] | None,
        lanes: int = LANES,
        size_class: tf.Tensor | None = None,
    ) -> Iterator[None]:
        """Context of one collective.

        Args:
            signature: Kind, dtype and shape of the collective; None if its shape is not known.
            size_class: Index of the size class of rows whose number is not known before, or None.
        """
        if signature is not None and self._name is not None:
            signature = *signature, self._name
        outer = self._signature, self._lane, self._size_class
        lane = 0 if signature is None else self._next_lane(signature, lanes)
        self._signature, self._lane, self._size_class = signature, lane, size_class
        try:
            yield
        finally:
            self._signature, self._lane, self._size_class = outer

    def next(self) -> tf.Tensor:
        """The key of the next execution of the collective, an int32 scalar."""
        with ops.device("CPU:0"):
            if self._signature is None:
                # A key of its own for each execution: keys are tied to one shape.
                counter = self._counter("unknown shape", [])
                counter.assign_add(1, read_value=False)
                return counter.read_value() + _UNKNOWN_SHAPE_KEYS
            if self._size_class is None:
                counter = self._counter((self._signature, self._lane), [])
                counter.assign_add(1, read_value=False)
                keys = _WINDOW // LANES
                turn = tf.math.floormod(counter.read_value(), keys)
                first = _STATIC_KEYS + self._slot(_STATIC_SLOTS) * _WINDOW
                return first + self._lane * keys + turn
            counter = self._counter(self._signature, [SIZE_CLASSES])
            counter.scatter_add(tf.IndexedSlices(tf.constant([1]), [self._size_class]))
            turn = tf.math.floormod(counter.sparse_read([self._size_class])[0], _WINDOW)
            first = _ROWS_KEYS + self._slot(_ROWS_SLOTS) * SIZE_CLASSES * _WINDOW
            return first + self._size_class * _WINDOW + turn

    def order(self, device: str) -> tf.Tensor | None:
        """The handle of the lane's ordering token; None if the collective's shape is not known."""
        if self._signature is None:
            return None
        name = self._signature, self._lane
        return _kept(self._orders, name, [], device, tf.float32).handle

    def _next_lane(self, signature: tuple[Any, ...], lanes: int) -> int:
        """Lanes take turns in each graph, so that all workers count alike, however they retrace."""
        if tf.executing_eagerly():
            return 0
        launched = self._launched.setdefault(ops.get_default_graph(), {})
        launched[signature] = launched.get(signature, -1) + 1
        return launched[signature] % lanes

    def _slot(self, slots: int) -> int:
        """Slot of the signature in the key space.

        It is a hash, so that workers need not agree on it.
        """
        signature = f"{self._group_key} {self._signature}"
        slot = zlib.crc32(signature.encode()) % slots
        while self._slots.setdefault((slots, slot), signature) != signature:
            slot = (slot + 1) % slots
        return slot

    def _counter(self, name: Any, shape: list[int]) -> tf.Variable:
        return _kept(self.counters, name, shape, "CPU:0", tf.int32)


def _kept(
    variables: dict[Any, tf.Variable], name: Any, shape: list[int], device: str, dtype: tf.DType
) -> tf.Variable:
    """The variable of a name in a dict, made of zeros at first."""
    if name not in variables:
        variables[name] = made_outside(lambda: tf.zeros(shape, dtype), device)
    return variables[name]


def padded_size(size: int | tf.Tensor) -> tf.Tensor:
    """The number of elements that `gather_rows` sends for so many."""
    return size_class_of(size)[0]


def size_class_of(rows: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Rounds a number of rows up to a size class.

    Returns `(rounded rows, index of the class)`.
    """
    # On the host, that has the rows' number and needs the class's: no GPU is asked in between.
    with tf.device("CPU:0"):
        sizes = tf.constant(_SIZES, tf.int32)
        index = tf.searchsorted(sizes, tf.reshape(tf.maximum(rows, 1), [1]))[0]
        return sizes[index], index


def padded_rows(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Pads a tensor of unknown leading dimensions to a size class.

    Returns `(matrix of rows of static shape, number of rows, index of the class)`.
    """
    dimensions = tensor.shape.as_list()
    leading = 1 + max(i for i, size in enumerate(dimensions) if size is None)
    flat = tf.reshape(tensor, [-1, *dimensions[leading:]])
    rows = tf.shape(flat)[0]
    padded, index = size_class_of(rows)
    flat = tf.pad(flat, [[0, padded - rows], *[[0, 0]] * len(dimensions[leading:])])
    return tf.ensure_shape(flat, [None, *dimensions[leading:]]), rows, index


def without_padding(padded: tf.Tensor, rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The inverse of `padded_rows`, for a tensor of the shape of `like`."""
    return tf.ensure_shape(tf.reshape(padded[:rows], tf.shape(like)), like.shape)
