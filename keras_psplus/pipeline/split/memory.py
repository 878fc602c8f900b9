"""Memory of a stage: weights, gradients, an optimizer's slots, and activations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from keras_psplus.keras_internals.keras_parts import loss_scale_optimizer
from keras_psplus.pipeline.split.costs import LayerCost

# Slots for each trainable variable, momentum apart; of others, as many are assumed as Adam has.
_SLOTS = {
    "Adadelta": 2,
    "Adafactor": 0,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "Ftrl": 2,
    "Lamb": 2,
    "Lion": 1,
    "Muon": 1,
    "Nadam": 2,
    "RMSprop": 1,
    "SGD": 0,
}
_UNKNOWN = 2


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a stage.

    Attributes:
        weights: Those of its layers' variables.
        gradients: Those of the gradients of the trainable ones.
        slots: Those of the optimizer's variables for them.
        activations: Those of what is kept until the backward passes.
    """

    weights: float = 0.0
    gradients: float = 0.0
    slots: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.slots + self.activations


def memory_of_stage(
    costs: Sequence[LayerCost], rows: float, slots: int | None, received: float
) -> Memory:
    """Memory of a stage that consists of some layers.

    Args:
        rows: Rows of the micro-batches whose activations are kept at once.
        slots: The optimizer's slots for each variable; None for layers that are not trained.
        received: Bytes per row that are received from other stages.
    """
    weights = sum(cost.bytes for cost in costs)
    if slots is None:
        return Memory(weights)
    trainable = sum(cost.trainable_bytes for cost in costs)
    kept = (received + sum(cost.kept for cost in costs)) * rows
    return Memory(weights, trainable, slots * trainable, kept)


class MemoryOfParts:
    """Memory of contiguous parts of a model's layers, each in constant time.

    Args:
        costs: The layers' costs, in the order of their calls.
        rows: For each stage, the rows of the micro-batches whose activations are kept at once.
        slots: As for `memory_of_stage`.
    """

    def __init__(
        self, costs: Sequence[LayerCost], rows: Sequence[float], slots: int | None
    ) -> None:
        self._rows = rows
        alone = [memory_of_stage([cost], 0, slots, 0).total for cost in costs]
        kept = [0.0 if slots is None else cost.kept for cost in costs]
        self._fixed, self._kept = _sums(alone), _sums(kept)
        # For each first layer, the bytes for a row that come from before it, by their first users.
        self._received = [_sums(one) for one in self._received_by(costs, slots is not None)]

    def __call__(self, stage: int, first: int, end: int) -> float:
        """Bytes that a stage needs for the layers from `first` to one before `end`."""
        kept = self._kept[end] - self._kept[first]
        received = self._received[first][end] - self._received[first][first]
        return self._fixed[end] - self._fixed[first] + self._rows[stage] * (kept + received)

    def _received_by(self, costs: Sequence[LayerCost], trains: bool) -> Iterator[list[float]]:
        for first in range(len(costs)):
            received = [0.0] * len(costs)
            for cost in costs[:first] if trains else ():
                for size, users in cost.tensors:
                    later = [user for user in users if user >= first]
                    if later:
                        received[min(later)] += size
            yield received


def _sums(numbers: Iterable[float]) -> list[float]:
    return [0.0, *itertools.accumulate(numbers)]


def slots_of(optimizer: Any) -> int | None:
    """Number of an optimizer's slots per variable, by its class and options."""
    if optimizer is None:
        return None
    if isinstance(optimizer, loss_scale_optimizer.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    count = next((_SLOTS[name] for name in names if name in _SLOTS), _UNKNOWN)
    options = ("momentum", "amsgrad", "centered", "use_ema", "gradient_accumulation_steps")
    return count + sum(bool(getattr(optimizer, option, None)) for option in options)
