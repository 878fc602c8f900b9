"""A pipeline's plan: which layers are on which stage, and what that comes to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.pipeline.base import schedule as timeline
from keras_psplus.pipeline.base.schedule import ONE_F_ONE_B, PIPEDREAM, Actions
from keras_psplus.pipeline.split.costs import LayerCost, Memory, memory_of_stage
from keras_psplus.pipeline.split.measure import Times

# The backward pass computes gradients by inputs and by weights.
_PASSES = 3
# Gradients by inputs take about half of a backward pass; see `weight_gradients`.
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
    """Conditions that a plan is made for.

    Attributes:
        orders: For each stage, its part of the schedule.
        microbatches: Number of micro-batches of a batch that go through each pipeline.
        slots: The optimizer's slots for each variable; None for a model that is not trained.
        other_devices: For each stage, the names of its devices in other pipelines.
    """

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
        """Rows of the largest micro-batch."""
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
    """Makes a plan of the costs of layers and their stages.

    Args:
        times: What the layers take for one micro-batch.
        are_milliseconds: Whether `times` are in milliseconds, or in no unit.
    """
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
