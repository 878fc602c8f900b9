"""A pipeline's plan: a model's layers cut into stages, and what that comes to."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.pipeline import schedule as timeline
from keras_psplus.pipeline.costs import LayerCost, Memory, Times, memory_of_stage
from keras_psplus.pipeline.schedule import ONE_F_ONE_B, PIPEDREAM, Actions

# Partition of a list into contiguous parts with the smallest largest cost.


def contiguous_parts(
    count: int, parts: int, cost: Callable[[int, int, int], float]
) -> list[tuple[int, int]]:
    """Partition `[first, end)` that minimizes the cost of its most expensive part.

    `cost` is of the number of a part, its first element and one past its last.
    """
    # best[k][j]: the smallest largest cost of the first j elements in k parts, and the last cut.
    best = [[(0 if j == 0 else math.inf, 0) for j in range(count + 1)]]
    for k in range(1, parts + 1):
        row = []
        for j in range(count + 1):
            cuts = range(k - 1, j)
            choices = ((max(best[k - 1][i][0], cost(k - 1, i, j)), i) for i in cuts)
            row.append(min(choices, default=(math.inf, 0)))
        best.append(row)
    found, end = [], count
    for k in range(parts, 0, -1):
        first = best[k][end][1]
        found.append((first, end))
        end = first
    return found[::-1]


def summed(costs: Sequence[float]) -> Callable[[int, int, int], float]:
    sums = [0.0, *itertools.accumulate(costs)]
    return lambda part, first, end: sums[end] - sums[first]


def part_numbers(parts: list[tuple[int, int]]) -> list[int]:
    return [number for number, (first, end) in enumerate(parts) for _ in range(first, end)]


# Slowdown beside the fastest allowed to a cut whose memory is more even; from how many times the
# mean on a stage's memory counts as uneven; and bytes that fit everywhere.
_SLOWER, _UNEVEN, _SMALL = 1.1, 1.5, 64e6
# Slowdown allowed for fewer bytes from stage to stage: about the error of measuring.
_SLOWER_TO_SEND_LESS = 1.05


def balance(
    costs: Sequence[float],
    stages: int,
    memory: Callable[[int, int, int], float] | None = None,
    sent: Callable[[int], float] | None = None,
) -> list[int]:
    """Cuts a list into contiguous parts whose largest sum is as small as can be.

    If one part needs more than 1.5 times the mean memory, and more than 64 MB, a cut with less in
    its largest part is taken, as long as its largest sum is at most 1.1 times the smallest
    possible: of those, the one with the smallest largest sum whose memory is even, or else as even
    as it can be. So memory costs no more than a tenth of the speed, and what is even enough costs
    nothing. Else, of the cuts whose largest sum is at most 1.05 times the smallest possible, the
    one is taken that sends the fewest bytes at any place.

    `memory` is of the number of a part, its first element and one past its last; `sent` of the
    element that there is a cut before.
    """
    count = len(costs)
    if stages > count:
        raise ValueError(
            f"A model of {count} layer(s) cannot be cut into {stages} stages: start as many "
            "workers as the model has layers, or fewer. A layer of your own that has layers inside "
            f"counts as one. Received: {stages} stages"
        )
    time = summed(costs)
    fastest = contiguous_parts(count, stages, time)
    # Sums differ by rounding.
    shortest = max(time(0, *edges) for edges in fastest) * (1 + 1e-9)
    if sent is not None:
        fastest = _sending_least(count, stages, time, _SLOWER_TO_SEND_LESS * shortest, sent)
    if memory is None:
        return part_numbers(fastest)
    of_parts = [memory(part, *edges) for part, edges in enumerate(fastest)]
    mean = sum(of_parts) / stages
    if max(of_parts) <= max(_UNEVEN * mean, _SMALL):
        return part_numbers(fastest)
    most = _SLOWER * shortest
    even = contiguous_parts(count, stages, lambda *part: _if(time(*part) <= most, memory(*part)))
    least = max(memory(part, *edges) for part, edges in enumerate(even))
    limit = max(least, _UNEVEN * mean, _SMALL)
    return part_numbers(
        contiguous_parts(count, stages, lambda *part: _if(memory(*part) <= limit, time(*part)))
    )


def _sending_least(
    count: int,
    stages: int,
    time: Callable[[int, int, int], float],
    most: float,
    sent: Callable[[int], float],
) -> list[tuple[int, int]]:
    """The fastest partition of those within a time that send the fewest bytes."""

    def sends(_: int, first: int, end: int) -> float:
        return sent(end) if end < count else 0.0

    least = contiguous_parts(count, stages, lambda *part: _if(time(*part) <= most, sends(*part)))
    limit = max(sends(0, *edges) for edges in least)
    return contiguous_parts(count, stages, lambda *part: _if(sends(*part) <= limit, time(*part)))


def _if(allowed: bool, cost: float) -> float:
    return cost if allowed else math.inf


def by_patterns(
    names: Sequence[str], patterns: Sequence[Sequence[str]], all_fit: bool = True
) -> list[int]:
    """Finds the stages of layers, each in one of them, by patterns of their names."""
    found = []
    for name in names:
        fits = [
            stage
            for stage, of_stage in enumerate(patterns)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in of_stage)
        ]
        if len(fits) != 1:
            problem = f"fits the patterns of stages {fits}" if fits else "fits no pattern"
            raise ValueError(
                f"Every layer must be in one of `stages`, and '{name}' {problem}. The model's "
                f"layers are {', '.join(names)}. Received: stages={patterns}"
            )
        found += fits
    for of_stage in patterns if all_fit else ():
        for pattern in of_stage:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"No layer has a name like '{pattern}'. The model's layers are "
                    f"{', '.join(names)}. Received: stages={patterns}"
                )
    return found


def with_neighbours(known: Sequence[int | None]) -> list[int]:
    """Completes a list of stages: a layer without one is on its predecessor's."""
    stage = next((one for one in known if one is not None), 0)
    found = []
    for one in known:
        stage = stage if one is None else one
        found.append(stage)
    return found


# The backward pass computes gradients by inputs and by weights.
_PASSES = 3
# Gradients by inputs take about half of a backward pass; see `boundary.delay`.
_BY_INPUTS = 0.5


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a plan.

    Attributes:
        number: Its number, from 0.
        device: Name of its device.
        layers: Names of its layers, in the order of their calls.
        parameters: Elements of its layers' variables.
        memory: Bytes of these variables.
        flops: Floating-point operations for one row, forward and backward.
        sent: Bytes that it sends for one row, forward: what layers of other stages use. About as
            many come back as gradients.
        estimate: What it needs in training, estimated: a `Memory`.
        work: Its part of the time of all stages, forward and backward.
        milliseconds: What it takes for a batch, forward and backward; None if the layers were not
            measured.
        other_devices: Names of its devices in the other pipelines.
    """

    number: int
    device: str
    layers: tuple[str, ...]
    parameters: int
    memory: int
    flops: float
    sent: float
    estimate: Memory = Memory()
    work: float = 0.0
    milliseconds: float | None = None
    other_devices: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """The names of its layers, in a few words."""
        first, last = self.layers[0], self.layers[-1]
        return first if first == last else f"{first} .. {last} ({len(self.layers)})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model in stages.

    Attributes:
        model: The model's name.
        stages: Tuple of `Stage`.
        microbatches: Number of micro-batches of a batch that go through each pipeline.
        schedule: Name of the schedule.
        rows: Rows of a batch.
        expected_bubble: The part of the time in which stages wait, on an average, as each takes as
            long as it does. What tensors take on their way is not counted.
        milliseconds: What a step takes, likewise; None if the layers were not measured.
    """

    model: str
    stages: tuple[Stage, ...]
    microbatches: int
    schedule: str = "gpipe"
    rows: int = 1
    expected_bubble: float = 0.0
    milliseconds: float | None = None

    @property
    def pipelines(self) -> int:
        """Number of pipelines."""
        return 1 + len(self.stages[0].other_devices)

    @property
    def bubble(self) -> float:
        """Bubble of a balanced pipeline: the idle fraction of each stage's time.

        It is (p - 1) / (m + p - 1) for p stages and m micro-batches.

        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", NeurIPS 2019.
        """
        return (len(self.stages) - 1) / (self.microbatches + len(self.stages) - 1)

    def as_dict(self) -> dict[str, Any]:
        """The plan as what can be turned into JSON.

        Returns:
            Dict of dicts, lists, strings and numbers, with the key `"bubble"` beside the fields.
        """
        return dataclasses.asdict(self) | {"bubble": self.bubble}

    def __str__(self) -> str:
        names = "stage,device,layers,parameters,MB,activations MB,work,ms,sends MB"
        rows = [tuple(names.split(","))]
        for stage in self.stages:
            rows.append(
                (
                    f"{stage.number}",
                    ", ".join(map(_short, (stage.device, *stage.other_devices))),
                    stage.described,
                    f"{stage.parameters:,}",
                    f"{stage.estimate.total / 1e6:.1f}",
                    f"{stage.estimate.activations / 1e6:.1f}",
                    f"{stage.work:.0%}",
                    "-" if stage.milliseconds is None else f"{stage.milliseconds:.1f}",
                    f"{stage.sent * self.rows / self.pipelines / 1e6:.3f}",
                )
            )
        step = "" if self.milliseconds is None else f"about {self.milliseconds:.0f} ms a step, "
        pipelines = f" and {self.pipelines} pipelines" if self.pipelines > 1 else ""
        return (
            f"'{self.model}' in {len(self.stages)} stages{pipelines}, batches of {self.rows} rows "
            f'in {self.microbatches * self.pipelines} micro-batches, "{self.schedule}": {step}'
            f"stages wait {self.expected_bubble:.0%} of the time\n{text_table.aligned(rows)}"
        )


@dataclasses.dataclass(frozen=True)
class Split:
    """Conditions that a plan is made for; each pipeline has so many micro-batches."""

    devices: Sequence[str]
    schedule: str
    orders: Sequence[Actions]
    microbatches: int
    rows: int
    slots: int | None
    other_devices: Sequence[tuple[str, ...]]

    @property
    def pipelines(self) -> int:
        return 1 + len(self.other_devices[0])

    @property
    def rows_of_microbatch(self) -> int:
        return math.ceil(self.rows / self.microbatches)

    @property
    def kept_rows(self) -> list[int]:
        """For each stage, the rows of the micro-batches whose activations it keeps at once."""
        batches = 2 if self.schedule == PIPEDREAM else 1
        return [
            batches * timeline.most_kept(order) * self.rows_of_microbatch for order in self.orders
        ]


def make(
    model: str,
    costs: Sequence[LayerCost],
    stages_of: Sequence[int],
    times: Sequence[Times],
    are_milliseconds: bool,
    split: Split,
) -> Plan:
    """Makes a plan of layers' costs, stages, and times for one micro-batch."""
    count = len(split.devices)
    forward, backward = [0.0] * count, [0.0] * count
    for stage, one in zip(stages_of, times):
        forward[stage] += one.forward
        backward[stage] += one.backward
    busy = [a + b for a, b in zip(forward, backward)]
    total = sum(busy) or 1.0
    if split.schedule == PIPEDREAM:
        # No stage waits for the end of a batch, but all do for the slowest of them.
        span = split.microbatches * max(busy)
    else:
        by_inputs = _BY_INPUTS if split.schedule == ONE_F_ONE_B else 1.0
        span = timeline.makespan(split.orders, forward, backward, by_inputs)
    stages = []
    for number, device in enumerate(split.devices):
        own = [cost for cost, stage in zip(costs, stages_of) if stage == number]
        sent = sum(
            size
            for cost in own
            for size, users in cost.tensors
            for _ in {stages_of[user] for user in users} - {number}
        )
        received = sum(
            size
            for cost, stage in zip(costs, stages_of)
            if stage != number
            for size, users in cost.tensors
            if any(stages_of[user] == number for user in users)
        )
        stages.append(
            Stage(
                number,
                device,
                tuple(cost.layer.name for cost in own) or ("none",),
                sum(cost.parameters for cost in own),
                sum(cost.bytes for cost in own),
                _PASSES * sum(cost.flops for cost in own),
                sent,
                memory_of_stage(own, split.kept_rows[number], split.slots, received),
                busy[number] / total,
                split.microbatches * busy[number] if are_milliseconds else None,
                split.other_devices[number],
            )
        )
    wait = 1 - split.microbatches * total / (count * span) if span else 0.0
    return Plan(
        model,
        tuple(stages),
        split.microbatches,
        split.schedule,
        split.rows * split.pipelines,
        max(0.0, wait),
        span if are_milliseconds else None,
    )


def _short(device: str) -> str:
    """A device's name for people: the worker's, if it has one device."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.job != "worker":
        return f"{spec.device_type}:{spec.device_index}"
    gpu = f" GPU:{spec.device_index}" if spec.device_type == "GPU" else ""
    return f"worker-{spec.task}{gpu}"
