"""Totals of the closure variables, to which steps add what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable, pack, unpack

# Odd, so that no two shares of any step share a seed (mod 2 ** 31).
_SEED_STRIDE = 0x3C6EF35F


class ClosureTotals:
    """Values of closure variables, kept by the chief while steps are under way.

    Attributes:
        values: A float64 vector, with the seeds of the beginning.
        draws: Advance of the seeds in one step; None until a step has shown it.
        steps: Number of steps that have been sent.
    """

    def __init__(
        self, variables: Sequence[ClosureVariable], draws: np.ndarray | None = None
    ) -> None:
        self.variables, self.values, self.draws = list(variables), pack(variables), draws
        self.steps = 0
        self._is_seed = self._flags(lambda variable: variable.is_seed)
        self._is_integer = self._flags(lambda variable: variable.dtype.is_integer)

    def _flags(self, of_variable: Callable[[ClosureVariable], bool]) -> np.ndarray:
        flags = [np.full(v.shape.num_elements(), of_variable(v)) for v in self.variables]
        return np.concatenate([np.zeros(0, bool), *flags])

    @property
    def has_seeds(self) -> bool:
        """Whether a seed is among the variables."""
        return bool(self._is_seed.any())

    @property
    def next(self) -> np.ndarray:
        """Values for the next step: no two steps draw the same."""
        return self.values if self.draws is None else self.values + self.draws * self.steps

    def next_for(self, share: int) -> np.ndarray:
        """Values for a worker's share of the next step: each share draws from other seeds."""
        values, first = self.next.copy(), 0
        for variable in self.variables:
            if variable.is_seed:
                values[first] = (values[first] + share * _SEED_STRIDE) % (1 << 31)
            first += variable.shape.num_elements()
        return values

    def note_draws(self, changes: np.ndarray, steps: int) -> None:
        """Notes how far steps have moved the seeds, if it is not known yet."""
        if self.draws is None:
            self.draws = np.where(self._is_seed, changes / steps, 0.0)

    def add(
        self,
        changes: np.ndarray,
        parts: np.ndarray,
        steps: int,
        overwritten: Sequence[ClosureVariable],
    ) -> np.ndarray:
        """Adds what steps have changed; returns sums for metrics, means for others.

        Args:
            changes: The changes in each share of a step, a matrix.
            parts: Each share's part of the rows.
            overwritten: Variables that a step replaces instead of adding to them.
        """
        self.note_draws(changes[0], steps)
        change = changes[0]
        if len(parts) > 1:
            replaced = {id(variable) for variable in overwritten}
            is_sum = self._flags(lambda v: v.kind == "total" and id(v) not in replaced)
            means = parts @ changes
            means = np.where(self._is_integer, np.rint(means), means)
            change = np.where(is_sum, changes.sum(0), means)
        change = np.where(self._is_seed, 0.0, change)
        self.values = self.values + change
        return change

    def write(self) -> None:
        """Writes them to the chief's variables, seeds after all steps that have been sent."""
        unpack(self.variables, self.next)


def are_same(variables: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold the same objects in the same order."""
    return len(variables) == len(others) and all(a is b for a, b in zip(variables, others))
