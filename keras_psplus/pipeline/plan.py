"""A pipeline's plan: which layers are on which stage, and what that comes to."""

import dataclasses

import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.pipeline.costs import LayerCost

# The backward pass computes gradients by inputs and by weights.
_PASSES = 3


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
        other_devices: Names of its devices in the other pipelines.
    """

    number: int
    device: str
    layers: tuple[str, ...]
    parameters: int
    memory: int
    flops: float
    sent: float
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
    """

    model: str
    stages: tuple[Stage, ...]
    microbatches: int

    @property
    def pipelines(self) -> int:
        """Number of pipelines."""
        return 1 + len(self.stages[0].other_devices)

    @property
    def bubble(self) -> float:
        """The part of the time in which a stage waits, if all take as long: (p - 1) / (m + p - 1).

        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", NeurIPS 2019.
        """
        return (len(self.stages) - 1) / (self.microbatches + len(self.stages) - 1)

    def __str__(self):
        total = sum(stage.flops for stage in self.stages) or 1.0
        rows = [("stage", "device", "layers", "parameters", "MB", "work", "sends KB/row")]
        for stage in self.stages:
            rows.append(
                (
                    f"{stage.number}",
                    ", ".join(map(_short, (stage.device, *stage.other_devices))),
                    stage.described,
                    f"{stage.parameters:,}",
                    f"{stage.memory / 1e6:.1f}",
                    f"{stage.flops / total:.0%}",
                    f"{stage.sent / 1e3:.2f}",
                )
            )
        pipelines = f" and {self.pipelines} pipelines" if self.pipelines > 1 else ""
        return (
            f"'{self.model}' in {len(self.stages)} stages{pipelines}, {self.microbatches} "
            f"micro-batches, each stage waits at least {self.bubble:.0%} of the time\n"
            f"{text_table.aligned(rows)}"
        )


def make(
    model: str,
    costs: list[LayerCost],
    stages_of: list[int],
    devices: list[str],
    microbatches: int,
    other_devices: list[tuple[str, ...]] | None = None,
) -> Plan:
    """Makes a plan of the costs of layers and their stages.

    Args:
        model: Name of the model.
        costs: List of `costs.LayerCost`.
        stages_of: List of the layers' stages.
        devices: Names of the stages' devices, in the first pipeline.
        microbatches: Number of micro-batches.
        other_devices: For each stage, the names of its devices in other pipelines.
    """
    stages = []
    for number, device in enumerate(devices):
        own = [cost for cost, stage in zip(costs, stages_of) if stage == number]
        sent = sum(
            size
            for cost in own
            for size, users in cost.tensors
            for _ in {stages_of[user] for user in users} - {number}
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
                () if other_devices is None else other_devices[number],
            )
        )
    return Plan(model, tuple(stages), microbatches)


def _short(device):
    """A device's name for people: the worker's, if it has one device."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.job != "worker":
        return f"{spec.device_type}:{spec.device_index}"
    gpu = f" GPU:{spec.device_index}" if spec.device_type == "GPU" else ""
    return f"worker-{spec.task}{gpu}"
