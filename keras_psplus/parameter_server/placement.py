"""Placement of variables and shards on parameter servers."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import shown

# Numbers of shards of variables too large to be sent in one tensor.
#
# TensorFlow sends no tensor of 2 GiB between tasks. A larger shard could be trained by rows, but
# neither be read as a whole nor saved.


Shape: TypeAlias = tf.TensorShape | Sequence[int]
DType: TypeAlias = tf.DType | str
# Above this, a variable is made here and not by TensorFlow, which would send it whole.
LARGE_BYTES = 1 << 30
# Of what a task can send at once, with room for what goes with it.
MOST_BYTES = (1 << 31) - (1 << 20)


def size_of(shape: Shape, dtype: DType) -> int:
    """Bytes of a variable."""
    return tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size


def offsets_of(shape: Shape, dtype: DType, shards: int, keeps_whole: bool) -> list[int]:
    """The first rows of a large variable's shards, and the number of all.

    With `keeps_whole`, shards of more than `LARGE_BYTES` stay so if they can be sent.
    """
    return offsets_of_rows(shape[0], row_bytes_of(shape, dtype), shards, keeps_whole)


def row_bytes_of(shape: Shape, dtype: DType) -> int:
    """Bytes of a variable's row; raises ValueError if that is too large to be sent."""
    row_bytes = size_of(shape[1:], dtype)
    if row_bytes > MOST_BYTES:
        raise ValueError(
            "A variable on parameter servers is cut along its first axis into parts of less than "
            "2 GiB. Give it another shape, or make it smaller. "
            f"Received: shape={tuple(shape)}, dtype={tf.as_dtype(dtype).name}"
        )
    return row_bytes


def offsets_of_rows(rows: int, row_bytes: int, shards: int, keeps_whole: bool) -> list[int]:
    """As `offsets_of`, for so many rows of so many bytes."""
    shards = min(shards, rows)
    most = MOST_BYTES if keeps_whole else LARGE_BYTES
    if -(-rows // shards) * row_bytes > most:
        shards = max(shards, -(-rows // max(1, LARGE_BYTES // row_bytes)))
    base, extra = divmod(rows, shards)
    return [i * base + min(i, extra) for i in range(shards + 1)]


def form_of(
    kwargs: Mapping[str, Any], shape: Shape | None
) -> tuple[tf.TensorShape | None, DType | None]:
    """Shape and dtype of a variable to be made; None unless both are known."""
    value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
    if isinstance(value, (tf.Tensor, np.ndarray)):
        shape, dtype = value.shape, dtype or value.dtype
    elif shape is None:
        shape = kwargs.get("shape")
    if shape is None or dtype is None or not tf.TensorShape(shape).is_fully_defined():
        return None, None
    return tf.TensorShape(shape), dtype


def size_if_known(kwargs: Mapping[str, Any]) -> int:
    """Bytes of a variable before its creation; 0 if its shape is not known yet."""
    shape, dtype = form_of(kwargs, None)
    return 0 if shape is None or dtype is None else size_of(shape, dtype)


# Placement of variables and shards on parameter servers.
#
# Variables are created one after the other, and later ones are unknown. So a large variable is cut
# over all servers, which leaves their balance unchanged, and a variable that is too small for that
# is placed on the least loaded server. In that way servers are balanced whatever the order, and a
# step's reads and gradients use all their links from the first byte to the last.


# Below this a message costs more than its bytes.
LEAST_SHARD_BYTES = 32 << 10
# Above this, cutting further wins nothing.
MOST_LEAST_SHARD_BYTES = 1 << 20
# Of shards that are sent, updated and read one after the other: each has an update of its own.
FINE_SHARD_BYTES, _MOST_FINE_SHARDS = 1 << 20, 8
# Of a server's bytes: what is not cut has less than two of these, a tenth.
_LEAST_PART = 0.05


class Shard(NamedTuple):
    """Rows `first` to `end` of a variable; `ps` None for the least loaded."""

    ps: int | None
    first: int
    end: int


class Placement:
    """Bytes of each parameter server, and the choice of the next server.

    Args:
        weights: A positive number for each server, which its part of the bytes is proportional to.
        cuts_finely: Whether a server may have several shards of a large variable, each of which is
            sent, updated and read by itself.

    Attributes:
        weights: The servers' parts of the bytes, with a sum of 1.
    """

    def __init__(self, weights: Sequence[float], cuts_finely: bool = False) -> None:
        self._cuts_finely = cuts_finely
        self.weights = [weight / sum(weights) for weight in weights]
        # What is trained has an optimizer's slots beside it, so that each kind is balanced alone.
        self._bytes = {is_trained: [0] * len(weights) for is_trained in (True, False)}

    @property
    def bytes_on_ps(self) -> list[int]:
        return [sum(both) for both in zip(*self._bytes.values())]

    def least_loaded(self, size: int, is_trained: bool) -> int:
        have, all_have = self._bytes[is_trained], self.bytes_on_ps
        return min(
            range(len(have)),
            key=lambda ps: ((have[ps] + size) / self.weights[ps], all_have[ps] / self.weights[ps]),
        )

    def add(self, ps: int, size: int, is_trained: bool) -> None:
        self._bytes[is_trained][ps] += size

    def cut(
        self, shape: Shape, dtype: DType, is_trained: bool, is_table: bool = False
    ) -> list[Shard]:
        """Cuts a variable by rows so that all servers' bytes stay balanced.

        Returns one shard of all rows if it stays whole, and raises ValueError if a row is too
        large. A table, of which steps look up rows, is not cut finely: each shard is asked by
        itself, and not much is sent.
        """
        rows = shape[0]
        row_bytes = row_bytes_of(shape, dtype)
        size = rows * row_bytes
        if not size:
            return [Shard(self.least_loaded(0, is_trained), 0, rows)]
        wanted = self._wanted(size, is_trained)
        total = sum(self._bytes[is_trained]) + size
        least = _LEAST_PART * total / len(wanted)
        least = min(max(least, LEAST_SHARD_BYTES), MOST_LEAST_SHARD_BYTES)
        while len(wanted) > 1:
            scale = size / sum(wanted.values())
            smallest = min(wanted, key=lambda ps: wanted[ps])
            enough_rows = len(wanted) <= rows
            if enough_rows and wanted[smallest] * scale >= least:
                break
            del wanted[smallest]
        if len(wanted) == 1:
            wanted = {self.least_loaded(size, is_trained): 1.0}
        most = LARGE_BYTES
        if self._cuts_finely and not is_table:
            most = max(FINE_SHARD_BYTES, size // (_MOST_FINE_SHARDS * len(wanted)))
        return _shards(_whole_rows(wanted, rows), row_bytes, most)

    def _wanted(self, size: int, is_trained: bool) -> dict[int, float]:
        """By server, how many of a variable's bytes would make up its part."""
        have = self._bytes[is_trained]
        total = sum(have) + size
        wanted = {ps: weight * total - have[ps] for ps, weight in enumerate(self.weights)}
        return {ps: missing for ps, missing in wanted.items() if missing > 0}


def _whole_rows(wanted: Mapping[int, float], rows: int) -> dict[int, int]:
    """Rows of each server, as near to what is wanted as whole ones can be."""
    scale = rows / sum(wanted.values())
    counts = {ps: int(part * scale) for ps, part in wanted.items()}
    by_rest = sorted(wanted, key=lambda ps: counts[ps] - wanted[ps] * scale)
    for ps in by_rest[: rows - sum(counts.values())]:
        counts[ps] += 1
    return {ps: count for ps, count in sorted(counts.items()) if count}


def _shards(counts: Mapping[int, int], row_bytes: int, most: int) -> list[Shard]:
    shards, first = [], 0
    for ps, rows in counts.items():
        count = -(-rows * row_bytes // most)
        offsets = offsets_of_rows(rows, row_bytes, count, keeps_whole=False)
        shards += [Shard(ps, first + a, first + b) for a, b in zip(offsets, offsets[1:])]
        first += rows
    return shards


def weights_of(addresses: Sequence[str]) -> list[float]:
    """Weights of the servers, to which their parts of the bytes are proportional.

    Hosts have equal weights, whose servers share a link.
    """
    hosts = [address.rpartition(":")[0] for address in addresses]
    servers = collections.Counter(hosts)
    return [1.0 / servers[host] for host in hosts]


def check_partitioner(given: object) -> None:
    is_auto = isinstance(given, str) and given == "auto"
    if given is not None and not is_auto and not callable(given):
        raise ValueError(
            '`variable_partitioner` must be "auto", None, or one of '
            "`tf.distribute.experimental.partitioners`. "
            f"Received: variable_partitioner={shown(given)}"
        )
