"""Several tensors in one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher

DEFAULT_BUCKET_BYTES = 4 << 20
_MOST_PIECES = 8
# Buckets whose copies are in memory at once; the next one is on its way while one is summed.
_UNDER_WAY = 2
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


def pack_and_sum(launcher: Launcher, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors of one dtype and static shapes over all replicas, by one collective."""
    if len(tensors) == 1:
        return [launcher.all_reduce(tensors[0])]
    sizes = [int(np.prod(t.shape.as_list())) for t in tensors]
    packed = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    pieces = tf.split(launcher.all_reduce(packed), sizes)
    return [tf.reshape(piece, t.shape) for piece, t in zip(pieces, tensors)]


def sum_packed(launcher: Launcher, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors of static shapes over all replicas, by one collective for each dtype."""
    summed = list(tensors)
    for dtype in sorted({t.dtype.name for t in tensors}):
        group = [i for i, t in enumerate(tensors) if t.dtype.name == dtype]
        for i, tensor in zip(group, pack_and_sum(launcher, [tensors[i] for i in group])):
            summed[i] = tensor
    return summed


def after(operations: Sequence[tf.Operation | tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, for what is to wait for these operations (or tensors) too."""
    if not operations:
        return tensor
    with tf.control_dependencies(operations):
        return tf.identity(tensor)


class HopOrder:
    """Limits the number of concurrent sends along one hop, of a ring or a topology.

    Sends wait for earlier ones, so that what is sent first arrives first. Gradients are ready long
    before a slow link has sent them: else their copies would all be in memory. All replicas of a
    hop have to send in the same order.
    """

    def __init__(self, at_once: int = _UNDER_WAY) -> None:
        self._at_once = at_once
        self._arrived: list[list[tf.Tensor]] = []

    def _before(self) -> list[tf.Tensor]:
        return self._arrived[-self._at_once] if len(self._arrived) >= self._at_once else []

    def wait(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns `tensors`, made to wait for earlier sends on the hop."""
        return [after(self._before(), tensor) for tensor in tensors]

    def waiting(self) -> AbstractContextManager[Any]:
        return tf.control_dependencies(self._before())

    def end(self, tensors: list[tf.Tensor]) -> None:
        """Marks the last send as complete; `tensors` are its results."""
        self._arrived.append(tensors)


def pieces(tensor: tf.Tensor, size: int, multiple: int) -> list[tf.Tensor]:
    """Cuts a tensor into a few flat pieces of one length, but for the last.

    Args:
        tensor: Tensor of static shape.
        size: Bytes that each piece is to have at least.
        multiple: Number that their length is a multiple of.
    """
    elements = tensor.shape.num_elements()
    count = min(max(1, int(elements * tensor.dtype.size // size)), _MOST_PIECES)
    flat, length = tf.reshape(tensor, [-1]), -(-elements // count // multiple) * multiple
    return [flat[start : start + length] for start in range(0, elements, length)]


def buckets(
    items: Iterable[_Item],
    key: Callable[[_Item], _Key],
    size: Callable[[_Item], int],
    bucket_bytes: int,
) -> list[tuple[_Key, list[_Item]]]:
    """Groups items of one key, closing a bucket once it is full.

    An item that would fill one by itself has it for itself, so that nothing large is copied to go
    with others.

    Returns:
        List of `(key, items)`, in the order of the buckets' last items: what is made in the order
        of items is complete in that of buckets. What has not become full comes behind all others
        of its key: in front of one, it would be one of the few that are on their way at a time.
    """
    filling: dict[_Key, list[_Item]] = {}
    sizes: dict[_Key, int] = {}
    # By the place of its last item.
    closed: list[tuple[int, _Key, list[_Item]]] = []
    ends: dict[_Key, int] = {}
    for place, item in enumerate(items):
        kind, own = key(item), size(item)
        ends[kind] = place
        if own >= bucket_bytes:
            closed.append((place, kind, [item]))
            continue
        filling.setdefault(kind, []).append(item)
        sizes[kind] = sizes.get(kind, 0) + own
        if sizes[kind] >= bucket_bytes:
            closed.append((place, kind, filling.pop(kind)))
            sizes.pop(kind)
    closed += [(ends[kind], kind, rest) for kind, rest in filling.items()]
    return [(kind, bucket) for _, kind, bucket in sorted(closed, key=lambda one: one[0])]
