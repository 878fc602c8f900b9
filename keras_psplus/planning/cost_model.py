"""Cost model of a step under each entry: computing, compressing, and the links.

    ms = computing + compressors + messages + bytes between workers + bytes to and from servers

All constants are fitted to the tables of docs/benchmark_tables.md (two-core AMD EPYC, TensorFlow
2.21); `tests/planning/test_truth.py` holds the sum to these.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from keras_psplus.planning import link_bytes
from keras_psplus.planning.link_bytes import Flows, Work
from keras_psplus.planning.traits import Traits

# How much longer bytes between workers take than the link's rate says: headers, and TCP's start.
_BETWEEN = 1.09
# Milliseconds of a core for a million bytes that a task sends or receives: what is left of a step's
# communication over a link that is faster.
_MOVING_MS = 1.0
# While one bucket of gradients crosses the link, a core sends and receives others, if there are
# others: `MultiWorkerMirroredStrategy(bucket_bytes=)`.
_BUCKET_BYTES = 4 << 20
# Milliseconds of a message between two tasks, beside the link's delay. A sum in a ring goes round
# twice, what is gathered once; PowerSGD sums one of its matrices to find the other.
MESSAGE_MS = 0.5
_ROUNDS = {"topk": 1, "powersgd": 4}
# Parameter servers, of 2026-11-27: parts of the time that the busiest link's bytes take, one way
# after the other. Workers meet at the same servers; where steps overlap, they read while they send.
_ASYNC, _SYNC, _OVERLAPPING = 1.05, 1.1, 0.72
# Milliseconds for which one chief sends a step to the workers and hears of its end.
_ASYNC_MS, _SYNC_MS = 9.0, 20.0
# Milliseconds of the processor for a million elements: to encode, to decode, and for the residual.
COMPRESSOR_MS = {
    "bf16": 0.3,
    "fp16": 0.3,
    "int8": 1.67,
    "sign": 1.79,
    "topk": 1.98,
    "randomk": 0.82,
    "powersgd": 1.05,
}
# Of a dense layer's work, one third makes the kernel's gradient, which factors leave to be done for
# the rows of all workers.
_OF_GRADIENT = 1 / 3
# An entry scales if twice as many workers train at least this many times the rows in a second.
_SCALES, _MOST_WORKERS = math.sqrt(2), 4096
# `HybridStrategy(min_table_bytes=)`: smaller tables stay on the workers.
_LEAST_TABLE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Cluster that a plan is made for.

    Attributes:
        ps: Number of parameter servers.
        bits_per_second: Of each task's link, each way; None for no limit.
        delay_ms: From host to host.
        memory: Bytes of a worker's memory; None if they do not count.
        processor: How many times the milliseconds of docs/benchmark_tables.md the processor takes
            for compressors and messages, as where it is slower or tasks share a core.
    """

    workers: int = 2
    ps: int = 2
    bits_per_second: float | None = 1e9
    delay_ms: float = 0.0
    processor: float = 1.0
    memory: float | None = None

    def fits(self, one: Prediction) -> bool:
        """Whether what a worker keeps goes into its memory."""
        return self.memory is None or one.memory <= self.memory

    def ms_of(self, count: float) -> float:
        """Milliseconds in which so many bytes cross a link."""
        return 8e3 * count / self.bits_per_second if self.bits_per_second else 0.0

    def moving_ms(self, count: float) -> float:
        """Milliseconds in which a core sends or receives so many bytes."""
        return self.processor * _MOVING_MS * count / 1e6


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted costs of a step.

    Attributes:
        sent: Bytes that a worker sends.
        received: Bytes that it receives.
        ms: Milliseconds of a step in which every worker trains one batch.
        scales_to: The most workers, each with the same batch, that train at least 1.4 times the
            rows of half as many in a second; a power of two.
        ends_by: The part of a step that grows most with twice as many; None if they are enough.
        memory: Bytes of weights, gradients and the optimizer's state on a worker.
    """

    sent: float
    received: float
    ms: float
    scales_to: int
    ends_by: str | None
    memory: float


class StepParts(NamedTuple):
    """Milliseconds of the parts of a step, by the names that tables give them.

    Attributes:
        computing: Forward and backward, with what factors leave to be done.
        compressors: Encoding, decoding and residuals.
        messages: What messages between workers take, whatever their bytes.
        links: Bytes from worker to worker.
        servers: Bytes from and to parameter servers, and their chief.
    """

    computing: float = 0.0
    compressors: float = 0.0
    messages: float = 0.0
    links: float = 0.0
    servers: float = 0.0


def predict(traits: Traits, work: Work, step_ms: float, cluster: Cluster) -> Prediction:
    """Predicts a step.

    Args:
        traits: How it trains.
        work: What one worker has to send.
        step_ms: Milliseconds of one worker's batch without communication.
        cluster: What it trains on.
    """
    moved = flows(traits, work, cluster.workers)
    return Prediction(
        moved.between + moved.up,
        moved.between + moved.down,
        milliseconds(traits, work, step_ms, cluster),
        *scales_to(traits, work, step_ms, cluster),
        memory(traits, work, cluster.workers),
    )


def milliseconds(traits: Traits, work: Work, step_ms: float, cluster: Cluster) -> float:
    """Milliseconds of a step, with arguments as of `predict`."""
    return sum(parts(traits, work, step_ms, cluster))


def parts(traits: Traits, work: Work, step_ms: float, cluster: Cluster) -> StepParts:
    """Parts of a step's milliseconds, with arguments as of `predict`."""
    if traits.path == "alone":
        return StepParts(step_ms)
    moved = flows(traits, work, cluster.workers)
    return StepParts(
        step_ms
        + _factors_ms(traits, work, step_ms, cluster)
        + _whole_ms(traits, work, step_ms, cluster),
        _compressors_ms(traits, work, cluster),
        _messages_ms(traits, work, moved, cluster),
        _links_ms(traits, work, moved, cluster),
        _servers_ms(traits, work, moved, cluster),
    )


def flows(traits: Traits, work: Work, workers: int) -> Flows:
    """The bytes of a worker, of what the library sends today."""
    if traits.path == "hybrid":
        small = [table for table in work.tables if 4 * table.elements < _LEAST_TABLE]
        large = [table for table in work.tables if 4 * table.elements >= _LEAST_TABLE]
        _, up, down = link_bytes.flows(traits, Work([], large), workers)
        mirrored = dataclasses.replace(traits, path="all_reduce")
        return Flows(
            link_bytes.flows(mirrored, Work(work.variables, small), workers).between, up, down
        )
    moved = link_bytes.flows(traits, work, workers)
    if traits.path == "parameter_server" and traits.updates == "local":
        # Whole tables are read and sent, though rows would do.
        whole = Work([*work.variables, *(link_bytes.Variable((t.elements,)) for t in work.tables)])
        return link_bytes.flows(traits, whole, workers)
    return moved


def scales_to(
    traits: Traits, work: Work, step_ms: float, cluster: Cluster
) -> tuple[int, str | None]:
    """The most workers that are of use, and what ends it, as `Prediction` says.

    Args are those of `predict`.
    """
    if traits.path == "alone":
        return 1, None

    def of(workers: int) -> StepParts:
        return parts(traits, work, step_ms, dataclasses.replace(cluster, workers=workers))

    # A ring takes half as much again with four workers as with two, but little more with eight, so
    # that it is the last doubling that counts.
    workers = _MOST_WORKERS
    while workers > 1 and 2 * sum(of(workers // 2)) / sum(of(workers)) < _SCALES:
        workers //= 2
    if workers == _MOST_WORKERS:
        return workers, None
    grown = [after - before for before, after in zip(of(workers), of(2 * workers))]
    return workers, StepParts._fields[grown.index(max(grown))]


def memory(traits: Traits, work: Work, workers: int) -> float:
    """Bytes of weights, gradients and the optimizer's state on a worker, without activations."""
    slots = work.slots
    rows = sum(table.rows_of(1) * table.dim for table in work.tables)
    if traits.path == "parameter_server":
        copies = 2 if traits.updates == "local" else 1
        return 4.0 * (copies * work.elements + work.elements + 2 * rows)
    if traits.path == "tensor_parallel":
        cut = sum(v.elements for v in work.variables if link_bytes.is_cut(v, workers))
        own = cut / workers + work.elements - cut
        return 4.0 * (own * (2 + slots) + work.table_elements / workers * (1 + slots) + rows)
    tables = [
        t.elements for t in work.tables if traits.path != "hybrid" or 4 * t.elements < _LEAST_TABLE
    ]
    # What compressors leave out is kept for the next step; casts leave nothing, nor do factors.
    name = (traits.compression or "").partition(":")[0]
    residual = name in ("int8", "sign", "topk", "randomk", "powersgd")
    anchors = 2 if traits.updates == "local" else traits.updates == "accumulate"
    if traits.shard is not None:
        # A gradient is whole until it is summed: that of the largest variable, if not of all.
        whole = max([v.elements for v in work.variables] + tables, default=0)
        kept = 1 / workers if traits.shard == "all" else 1.0
        each = kept + (1 + slots) / workers
        of_tables = sum(tables) * (kept + slots / workers)
        return 4.0 * (work.elements * each + of_tables + whole + rows)
    dense = work.elements * (2 + slots + residual + anchors)
    return 4.0 * (dense + sum(tables) * (1 + slots + anchors) + rows)


def _compressors_ms(traits: Traits, work: Work, cluster: Cluster) -> float:
    name = (traits.compression or "").partition(":")[0]
    pull = (traits.pull or "").partition(":")[0]
    of_rows = (traits.rows or "").partition(":")[0]
    rows = sum(table.rows_of(traits.every) * table.dim for table in work.tables)
    if traits.updates == "local":
        rows = work.table_elements
    sent = work.elements * COMPRESSOR_MS.get(name, 0.0)
    if of_rows in ("bf16", "fp16", "int8"):  # Others send rows as they are.
        sent += rows * COMPRESSOR_MS[of_rows]
    read = work.elements if traits.path == "parameter_server" else 0
    pulled = read * COMPRESSOR_MS.get(pull, 0.0)
    return cluster.processor * (sent / traits.every + pulled) / 1e6


def _factors_ms(traits: Traits, work: Work, step_ms: float, cluster: Cluster) -> float:
    elements = sum(
        variable.elements
        for variable in work.variables
        if link_bytes.goes_as_factors(variable, traits.compression, cluster.workers)
    )
    if not elements:
        return 0.0
    return (cluster.workers - 1) * _OF_GRADIENT * step_ms * elements / work.elements


def _whole_ms(traits: Traits, work: Work, step_ms: float, cluster: Cluster) -> float:
    """Milliseconds of layers that each worker computes alone, for the rows of all."""
    if traits.path != "tensor_parallel" or not work.elements:
        return 0.0
    whole = sum(v.elements for v in work.variables if not _is_shared(v, cluster.workers))
    return (cluster.workers - 1) * step_ms * whole / work.elements


def _is_shared(variable: link_bytes.Variable, workers: int) -> bool:
    return variable.factor_rows is not None and link_bytes.is_cut(variable, workers)


def _messages_ms(traits: Traits, work: Work, moved: Flows, cluster: Cluster) -> float:
    message = MESSAGE_MS * cluster.processor + cluster.delay_ms
    if traits.path == "tensor_parallel":
        # A gathering and a sum of each layer, one after the other.
        layers = sum(link_bytes.is_cut(one, cluster.workers) for one in work.variables)
        return (3 * layers + 2 * len(work.tables)) * (cluster.workers - 1) * message
    total = 0.0
    if moved.between:
        rounds = _ROUNDS.get((traits.compression or "").partition(":")[0], 2)
        # Weights in shares are gathered for backward as well.
        rounds += traits.shard == "all"
        total += rounds * (cluster.workers - 1) * message
    if moved.up:
        total += 4 * cluster.delay_ms  # There and back, to read and to send.
    return total / traits.every


def _links_ms(traits: Traits, work: Work, moved: Flows, cluster: Cluster) -> float:
    link_ms = _BETWEEN * cluster.ms_of(moved.between)
    core_ms = cluster.moving_ms(2 * moved.between)
    elements = work.elements + (work.table_elements if traits.updates == "local" else 0)
    buckets = max(1.0, link_bytes.WORD * elements / _BUCKET_BYTES)
    return max(link_ms, core_ms) + min(link_ms, core_ms) / buckets


def _servers_ms(traits: Traits, work: Work, moved: Flows, cluster: Cluster) -> float:
    if not traits.has_servers:
        return 0.0
    share = cluster.workers / cluster.ps
    both = moved.up + moved.down
    if traits.path == "hybrid":
        # Workers read rows while others still send theirs.
        own = max(moved.up, moved.down) if traits.prefetch else both
        link_ms = cluster.ms_of(max(own, share * max(moved.up, moved.down)))
        return max(link_ms, cluster.moving_ms(max(1.0, share) * both))
    factor, ms = (_SYNC, _SYNC_MS) if traits.waits else (_ASYNC, _ASYNC_MS)
    # Rows are looked up in the synchronous step itself, once the step before has updated them.
    if traits.overlaps and not (traits.waits and work.tables):
        factor = _OVERLAPPING
    busiest = max(1.0, share) * both
    return cluster.processor * ms / traits.every + max(
        factor * cluster.ms_of(busiest), cluster.moving_ms(busiest)
    )
