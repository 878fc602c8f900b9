"""One worker's step with `updates=LocalSGD`: it changes its own copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.parameter_server.tracing import local_copies
from keras_psplus.parameter_server.transport import server_side
from keras_psplus.parameter_server.updates.local_sgd import LocalSGDVariables

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.updates import Updates


def alone(context: StepContext, model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's step to run on a worker's copies, if `updates` is local.

    Otherwise returns the step unchanged.
    """
    # Of a local rule, `LocalSGDUpdates`.
    updating: Any = context.updating
    policy = updating.policy
    if policy is None or not policy.local:
        return step

    def step_alone(batch: Any) -> Any:
        optimizers = [one for one in optimizers_of(model).values() if one.built]
        variables_of = {}
        seen: set[int] = set()
        for one in optimizers:
            variables_of[one] = _variables_of(one, policy, seen)
        constraints = [
            (variable, variable.constraint)
            for one in optimizers
            for variable in one._trainable_variables
            if variable.constraint is not None
        ]

        def satisfied(weights: Iterable[tf.Variable]) -> None:
            known = {id(weight) for weight in weights}
            own = [(v, c) for v, c in constraints if id(v._value) in known]
            # A mean of weights that satisfy a constraint need not.
            server_side.constrain(context.strategy, own)

        with updating.alone(variables_of, satisfied):
            return step(batch)

    return step_alone


def _variables_of(
    optimizer: keras.optimizers.Optimizer, policy: Updates, seen: set[int]
) -> LocalSGDVariables:
    # A weight that two optimizers change has one copy.
    weights = [v for v in optimizer._trainable_variables if id(v) not in seen]
    seen.update(id(variable) for variable in weights)
    averages = list(optimizer._model_variables_moving_average) if optimizer.use_ema else []
    averages = [variable for variable in averages if variable is not None]
    sums = optimizer._accumulated_gradients if optimizer.gradient_accumulation_steps else []
    others = [*averages, *sums, optimizer._iterations]
    slots = [
        variable
        for variable in optimizer.variables
        if variable.value.dtype.is_floating
        and variable.name != "learning_rate"
        and all(variable is not other for other in others)
    ]
    if policy.average_slots:
        shapes = {tuple(variable.shape) for variable in optimizer._trainable_variables}
        averages += [slot for slot in slots if tuple(slot.shape) in shapes]
        slots = [slot for slot in slots if tuple(slot.shape) not in shapes]
    kinds = weights, averages, slots, [optimizer._iterations]
    return LocalSGDVariables(*([variable._value for variable in kind] for kind in kinds))


def check_that_it_is_alone(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Raises ValueError if a worker has no copies of what an optimizer changes."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for variable in [*variables, inner._iterations]:
        value = variable._value
        if local_copies.handle_of(getattr(value, "shards", [value])[0]) is None:
            raise ValueError(
                "With `updates=LocalSGD(...)` under parameter servers, an optimizer has to be an "
                "attribute of the model, built before the first step, and applied by the "
                "`train_step` of `fit`: its variables are copied to the workers. "
                f"Received: {optimizer.name} and the variable '{variable.path}'"
            )
