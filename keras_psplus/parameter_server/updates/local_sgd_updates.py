"""Workers that step alone, and what the chief knows of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import averaged_with_weights, optimizers_of, unwrapped
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.tracing import local_copies
from keras_psplus.parameter_server.transport import server_side
from keras_psplus.parameter_server.transport.reads import parts_of
from keras_psplus.parameter_server.updates.local_sgd import (
    LocalSGDRound,
    LocalSGDRounds,
    LocalSGDVariables,
)
from keras_psplus.parameter_server.updates.worker_updates import WorkerUpdates
from keras_psplus.updates import LocalSGD, Updates


class LocalSGDUpdates(WorkerUpdates):
    """`updates.LocalSGD`: each worker takes steps alone, and sends what they have changed."""

    policy: LocalSGD
    _LOST = (
        "worker-%d was lost with %d step(s) that it had taken alone and not sent yet; they are "
        "missing from training"
    )

    def __init__(self, context: StepContext, policy: LocalSGD) -> None:
        super().__init__(context, policy)
        self._rounds = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, LocalSGDRounds]()

    def wrap(self, model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
        def step_alone(batch: Any) -> Any:
            seen: set[int] = set()
            optimizers = [one for one in optimizers_of(model).values() if one.built]
            rounds = [LocalSGDRound(self._rounds_of(one, seen)) for one in optimizers]
            handles: dict[int, tf.Tensor] = {}
            for one in rounds:
                self._note(one)
                handles |= one.handles()
            with local_copies.handles.being(handles):
                logs = step(batch)
            for one in rounds:
                one.step()
            return logs

        return step_alone

    def _rounds_of(self, optimizer: keras.optimizers.Optimizer, seen: set[int]) -> LocalSGDRounds:
        variables = _variables_of(optimizer, self.policy, seen)
        if optimizer not in self._rounds:
            context = self._context()
            known = {id(weight) for weight in variables.weights}
            constraints = [
                (variable, variable.constraint)
                for variable in optimizer._trainable_variables
                if variable.constraint is not None and id(variable._value) in known
            ]
            self._rounds[optimizer] = LocalSGDRounds(
                context.extended,
                context.num_workers,
                self.policy,
                weakref.ref(optimizer),
                variables,
                # A mean of weights that satisfy a constraint need not.
                lambda: server_side.constrain(context.strategy, constraints),
            )
        return self._rounds[optimizer]

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient | None],
        variables: Sequence[keras.Variable],
    ) -> bool:
        for variable in [*variables, unwrapped(optimizer)._iterations]:
            if local_copies.handle_of(parts_of(variable._value)[0]) is None:
                raise ValueError(
                    "With `updates=LocalSGD(...)` under parameter servers, an optimizer has to be "
                    "an attribute of the model, built before the first step, and applied by the "
                    "`train_step` of `fit`: its variables are copied to the workers. "
                    f"Received: {optimizer.name} and the variable '{variable.path}'"
                )
        return False

    def _finisher(self, owner: keras.optimizers.Optimizer) -> tuple[int, Callable[[], None]]:
        rounds = self._rounds.get(owner)

        def finish() -> None:
            assert rounds is not None
            one = LocalSGDRound(rounds)
            self._note(one)
            one.finish()

        return int(rounds is not None), finish

    def training(self, variables: Sequence[keras.Variable]) -> list[keras.optimizers.Optimizer]:
        """The optimizers that train some of these Keras variables, so far as they are known."""
        wanted = {id(variable._value) for variable in variables}
        return [
            optimizer
            for optimizer, rounds in self._rounds.items()
            if any(id(weight) in wanted for weight in rounds.variables.weights)
        ]


def _variables_of(
    optimizer: keras.optimizers.Optimizer, policy: Updates, seen: set[int]
) -> LocalSGDVariables:
    # A weight that two optimizers change has one copy.
    weights = [v for v in optimizer._trainable_variables if id(v) not in seen]
    seen.update(id(variable) for variable in weights)
    sums = optimizer._accumulated_gradients if optimizer.gradient_accumulation_steps else []
    averaged = averaged_with_weights(optimizer, policy, optimizer._trainable_variables)
    averages = [v for v in averaged if v is not None and all(v is not one for one in sums)]
    others = [*averages, *sums, optimizer._iterations]
    slots = [
        variable
        for variable in optimizer.variables
        if variable.value.dtype.is_floating
        and variable.name != "learning_rate"
        and all(variable is not other for other in others)
    ]
    kinds = weights, averages, slots, [optimizer._iterations]
    return LocalSGDVariables(*([variable._value for variable in kind] for kind in kinds))
