"""TensorFlow's collectives, usable anywhere in a graph and with bounded memory.

They are launched as TensorFlow launches its own, with other instance keys and in another order; see
`instance_keys.py`. With NCCL, each waits for the one before it, as NCCL needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives import implementation, instance_keys
from keras_psplus.all_reduce.collectives.instance_keys import InstanceKeys
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.tf_internals import collective_ops, cross_device_ops, cross_device_utils
from keras_psplus.tf_internals import framework_ops as ops

# The order in which TensorFlow has the tasks of a group of collectives.
#
# It is that of their names as text, in which task 10 comes before task 2; a rank is no place in it.
# Rings go round in this order, and what is gathered or exchanged is in it. It cannot be chosen:
# what a task asks of the one that forms groups says nothing of an order.


def names_of(task: TaskConfig, local: int) -> list[str]:
    """TensorFlow's names of the tasks of all replicas, in rank order.

    Args:
        task: One of the cluster, whose parameter servers have no replicas.
        local: Number of replicas of one worker.
    """
    workers = [(job, index) for job, index, _ in task.tasks() if job != "ps"]
    names = [f"/job:{job}/replica:0/task:{index}" for job, index in workers]
    return [name for name in names for _ in range(local)]


def ranks_by_place(names: Sequence[str]) -> list[int]:
    """The rank that stands at each place of TensorFlow's order.

    Example:

    >>> ranks_by_place(["task:2", "task:9", "task:10"])
    [2, 0, 1]
    """
    # Several replicas of one task stay in their order.
    return sorted(range(len(names)), key=lambda rank: names[rank])


def places_by_rank(names: Sequence[str]) -> list[int]:
    """The place of each rank in TensorFlow's order: the inverse of `ranks_by_place`."""
    ranks = ranks_by_place(names)
    return sorted(range(len(ranks)), key=lambda place: ranks[place])


# Bytes up to which a sum is a gather.
_SHORT_OF_TWO, _SHORT = 1 << 18, 1 << 14
_SHORT_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


class Launcher(cross_device_utils.CollectiveReplicaLauncher):
    """Launches the collectives of one replica, with instance keys counted in the graph.

    Attributes:
        keys: The `InstanceKeys` of its collectives.
        members: Names of the tasks of the group's replicas, in rank order, as of
            `names_of`; None where TensorFlow's order is that of ranks.
    """

    def __init__(
        self,
        group_key: int,
        group_size: int,
        collective_keys: Any,
        device: str,
        options: Any,
        members: Sequence[str] | None = None,
    ) -> None:
        super().__init__(group_key, group_size, collective_keys, device, options)
        self.members, self._follows = members, self
        self.keys = InstanceKeys(group_key)

    def separate_order(self, name: str) -> AbstractContextManager[None]:
        """Context whose collectives wait only for others of the same name.

        Branches of a graph need it: each begins with the first lane, and would otherwise wait for
        earlier branches.
        """
        return self.keys.named(name)

    def all_reduce(
        self,
        input_tensor: tf.Tensor,
        control_input: tf.Tensor | tf.Operation | None = None,
        options: Any = None,
    ) -> tf.Tensor:
        tensor = tf.convert_to_tensor(input_tensor)
        if self._group_size == 1:
            return tensor
        if control_input is None and self._is_short(tensor):
            rows = self.gather(tensor[tf.newaxis])
            return tf.add_n(tf.unstack(rows, num=self._group_size))
        if not self._on_cpu and tensor.dtype in implementation.DTYPES:
            with ops.device(self._device):
                return implementation.all_reduce(
                    tensor, self._group_size, self.all_reduce, self.all_to_all, self.gather
                )
        with self._keys_for("reduce", tensor):
            return super().all_reduce(tensor, control_input, options)

    def _all_gather(self, input_tensor: tf.Tensor, options: Any = None) -> tf.Tensor:
        """Concatenates tensors of one shape along axis 0, in rank order."""
        tensor = tf.convert_to_tensor(input_tensor)
        if self._group_size == 1:
            return tensor
        with self._keys_for("gather", tensor):
            gathered = super()._all_gather(tensor, options)
        return self._by_rank(gathered)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates tensors of one static shape along axis 0, in rank order."""
        if not tensor.shape.num_elements():
            # The kernel would wait for ever for nothing to come.
            return tf.repeat(tensor, self._group_size, 0)
        return self._all_gather(tensor)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Exchanges rows: replica r gets the r-th row of each replica, in rank order.

        Args:
            tensor: Tensor of static shape, with as many rows as there are replicas.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self._group_size == 1 or not tensor.shape.num_elements():
            return tensor
        with self._keys_for("exchange", tensor), ops.device(self._device):
            exchanged = collective_ops.all_to_all_v2(
                self._by_place(tensor),
                self._group_size,
                self._group_key,
                self._next_instance_key(),
                communication_hint=self._options.implementation.value,
                timeout=self._options.timeout_seconds or 0,
                ordering_token=self._get_ordering_token(),
            )
            return self._by_rank(exchanged)

    def gather_rows(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers tensors whose number of rows differs between replicas.

        Args:
            tensor: Tensor of shape `(rows, ...)`; all but axis 0 equal on every replica.

        Returns:
            The rows of all replicas in rank order, and the int32 vector of their counts.
        """
        tensor = tf.convert_to_tensor(tensor)
        if self._group_size == 1:
            return tensor, tf.shape(tensor)[:1]
        if tensor.dtype in (tf.bfloat16, tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16):
            # The gather kernel knows none of these; the wider type holds them exactly.
            wide = tf.float32 if tensor.dtype == tf.bfloat16 else tf.int32
            rows, counts = self.gather_rows(tf.cast(tensor, wide))
            return tf.cast(rows, tensor.dtype), counts
        with ops.device(self._device):
            # As one vector: its shape is settled by the size class alone, and with it the keys.
            elements = tf.reshape(tensor, [-1])
            row_shape = tf.shape(tensor)[1:]
            mine = tf.stack([tf.shape(tensor)[0], tf.size(tensor)])
            gathered = tf.reshape(self._all_gather(mine), [self._group_size, 2])
            counts, sizes = gathered[:, 0], gathered[:, 1]
            everything = self._gather_elements(elements, tf.reduce_max(sizes))
            parts = [everything[rank, : sizes[rank]] for rank in range(self._group_size)]
            elements = tf.concat(parts, 0)
            rows = tf.reshape(elements, tf.concat([[tf.reduce_sum(counts)], row_shape], 0))
            return tf.ensure_shape(
                rows, tf.TensorShape([None]).concatenate(tensor.shape[1:])
            ), counts

    def reduce_equal(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums tensors of one shape, which may be known in a step alone."""
        if tensor.shape.is_fully_defined() or self._group_size == 1:
            return self.all_reduce(tensor)
        padded, rows, size_class = instance_keys.padded_rows(tensor)
        with self._keys_for_rows("reduce", padded, size_class):
            total = super().all_reduce(padded)
        return instance_keys.without_padding(total, rows, tensor)

    def gather_equal(self, tensor: tf.Tensor) -> tf.Tensor:
        """Stacks tensors as `reduce_equal` sums them."""
        if tensor.shape.is_fully_defined() or self._group_size == 1:
            return self.gather(tensor[tf.newaxis])
        padded, rows, size_class = instance_keys.padded_rows(tensor)
        with self._keys_for_rows("gather", padded, size_class):
            gathered = self._by_rank(super()._all_gather(padded, None))
        parts = [
            instance_keys.without_padding(part, rows, tensor)
            for part in tf.split(gathered, self._group_size)
        ]
        return tf.stack(parts)

    def _keys_for_rows(
        self, kind: str, tensor: tf.Tensor, size_class: tf.Tensor
    ) -> contextlib.AbstractContextManager[None]:
        signature = f"rows {kind}", tensor.dtype.name, tuple(tensor.shape[1:].as_list())
        return self.keys.of(signature, lanes=1, size_class=size_class)

    def gather_padded(self, tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Gathers matrices whose number of rows differs, zeros after those of the shorter ones.

        Args:
            tensor: Matrix of 4 bytes for each element, of as many columns on every replica.
            rows: int32 scalar, the number of rows on the replica that has the most.

        Returns:
            Matrix of `rows` rows for each replica, in rank order.
        """
        columns = tensor.shape[1]
        with ops.device(self._device):
            everything = self._gather_elements(tf.reshape(tensor, [-1]), rows * columns)
            return tf.reshape(everything[:, : rows * columns], [-1, columns])

    def _gather_elements(self, elements: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
        """Gathers vectors of different lengths, of which `most` is the greatest.

        Returns:
            Matrix with a row for each replica, which has `most` elements or more.
        """
        padded, size_class = instance_keys.size_class_of(most)
        signature = "rows", elements.dtype.name
        with self.keys.of(signature, lanes=1, size_class=size_class):
            everything = super()._all_gather(
                tf.pad(elements, [[0, padded - tf.size(elements)]]), None
            )
        return self._by_rank(tf.reshape(everything, [self._group_size, padded]))

    def all_gather(
        self, input_tensor: tf.Tensor, axis: int | tf.Tensor, options: Any = None
    ) -> tf.Tensor:
        if isinstance(axis, int) and axis == 0 and not tf.executing_eagerly():
            return self.gather_rows(input_tensor)[0]
        return super().all_gather(input_tensor, axis, options)

    def all_reduce_indexed_slices(
        self, input_slices: tf.IndexedSlices, options: Any = None
    ) -> tf.IndexedSlices:
        """Concatenates the slices of all replicas, in rank order.

        The order of rows is the one that a single process would have on the whole batch.
        """
        values, _ = self.gather_rows(input_slices.values)
        indices, _ = self.gather_rows(input_slices.indices)
        return tf.IndexedSlices(values, indices, input_slices.dense_shape)

    def _by_rank(self, tensor: tf.Tensor) -> tf.Tensor:
        """Reorders parts along axis 0 from TensorFlow's order of members to rank order."""
        return self._parts_at(tensor, places_by_rank)

    def _by_place(self, tensor: tf.Tensor) -> tf.Tensor:
        """The inverse of `_by_rank`."""
        return self._parts_at(tensor, ranks_by_place)

    def _parts_at(self, tensor: tf.Tensor, order_of: Callable[..., list[int]]) -> tf.Tensor:
        order = list(range(self._group_size))
        if self.members is not None:
            order = order_of(self.members)
        if order == sorted(order):
            return tensor
        parts = tf.split(tensor, self._group_size)
        return tf.concat([parts[i] for i in order], 0)

    def serialize_with(self, other: Launcher) -> None:
        """Has the collectives of two groups of one GPU follow each other.

        Those of NCCL run on one stream: replicas that began them in different orders would wait for
        each other without end.
        """
        self._follows = other._follows

    def like(self, group_key: int, ranks: Sequence[int]) -> Launcher:
        """Makes the collectives of some of the replicas, of which this one is one."""
        members = self.members and [self.members[rank] for rank in ranks]
        options = self._collective_keys, self._device, self._options
        made = Launcher(group_key, len(ranks), *options, members)
        made.serialize_with(self)
        return made

    @property
    def _on_cpu(self) -> bool:
        return "CPU" in self._device

    def _is_short(self, tensor: tf.Tensor) -> bool:
        """Whether to sum by a gather, which needs half of a ring's consecutive messages."""
        size = tensor.shape.num_elements()
        if not size or tensor.dtype not in _SHORT_DTYPES or not self._on_cpu:
            return False
        # Two replicas send no more than in a ring; several send at most so much more.
        limit = _SHORT_OF_TWO if self._group_size == 2 else _SHORT // (self._group_size - 1)
        return size * tensor.dtype.size <= limit

    def _keys_for(self, kind: str, tensor: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        is_static = tensor.shape.is_fully_defined()
        return self.keys.of(
            (kind, tensor.dtype.name, tuple(tensor.shape.as_list())) if is_static else None
        )

    def _next_instance_key(self) -> Any:
        return self.keys.next()

    def _get_ordering_token(self) -> Any:
        if not self._on_cpu and self._options.implementation.value == "NCCL":
            return super(Launcher, self._follows)._get_ordering_token()
        order = self.keys.order(self._device)
        return super()._get_ordering_token() if order is None else order


class CollectiveOps(cross_device_ops.CollectiveAllReduce):
    """`CollectiveAllReduce` whose launchers are this module's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._launchers: list[Launcher] = [
            Launcher(
                launcher._group_key,
                launcher._group_size,
                launcher._collective_keys,
                launcher._device,
                launcher._options,
            )
            for launcher in self._launchers
        ]

    @classmethod
    def like(cls, other: cross_device_ops.CollectiveAllReduce, options: Any) -> CollectiveOps:
        """Makes the same cross-device ops as TensorFlow's `other`, with our launchers.

        Args:
            options: `tf.distribute.experimental.CommunicationOptions` to use instead of its own.
        """
        return cls(other._devices, other._group_size, options, other._collective_keys)

    @property
    def launchers(self) -> list[Launcher]:
        return self._launchers

    def narrow(self, launchers: list[Launcher]) -> None:
        """Has them work between some of the replicas."""
        self._launchers, self._group_size = launchers, launchers[0]._group_size


# Outputs of `predict`, gathered from all replicas: dense, ragged and sparse tensors, strings.


# There is no operation that makes a string of bytes.
_BYTES = [bytes([number]) for number in range(256)]


def gather_rows(launcher: Launcher, rank: int, value: Any) -> Any:
    """Concatenates the replicas' rows in rank order, in graph mode.

    Args:
        rank: Rank of a local replica among all replicas.
        value: Tensor, `tf.RaggedTensor` or `tf.SparseTensor` of the replica.
    """
    if isinstance(value, tf.RaggedTensor):
        lengths = [gather_rows(launcher, rank, each) for each in value.nested_row_lengths()]
        flat = gather_rows(launcher, rank, value.flat_values)
        return tf.RaggedTensor.from_nested_row_lengths(flat, lengths, validate=False)
    if isinstance(value, tf.SparseTensor):
        shapes = gather_rows(launcher, rank, value.dense_shape[tf.newaxis])
        first = tf.reduce_sum(shapes[:rank, 0])
        indices = value.indices + tf.one_hot(0, value.shape.rank, on_value=first, dtype=tf.int64)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
        return tf.SparseTensor(
            gather_rows(launcher, rank, indices), gather_rows(launcher, rank, value.values), shape
        )
    if value.shape.rank == 0:
        value = value[tf.newaxis]
    if value.dtype == tf.string:
        return _gather_strings(launcher, value)
    return launcher.gather_rows(value)[0]


def _gather_strings(launcher: Launcher, value: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(value, [-1])
    lengths, _ = launcher.gather_rows(tf.strings.length(flat))
    rows, _ = launcher.gather_rows(tf.shape(value)[:1])
    own = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    codes, _ = launcher.gather_rows(own)
    characters = tf.gather(tf.constant(_BYTES), tf.cast(codes, tf.int32))
    texts = tf.strings.reduce_join(
        tf.RaggedTensor.from_row_lengths(characters, lengths, validate=False), axis=-1
    )
    shape = tf.concat([[tf.reduce_sum(rows)], tf.shape(value)[1:]], 0)
    return tf.ensure_shape(tf.reshape(texts, shape), [None, *value.shape[1:]])
