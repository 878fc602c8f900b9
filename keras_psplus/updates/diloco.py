"""Many steps of each worker alone; an outer optimizer takes their mean for its gradient."""

from collections.abc import Callable
from typing import Any

import keras

from keras_psplus.arguments import number, shown, whole_number
from keras_psplus.updates.base import Context, Updates
from keras_psplus.updates.local_sgd import LocalSteps, assign_to_fragments


def nesterov() -> keras.optimizers.Optimizer:
    """The outer optimizer of the DiLoCo paper."""
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


class DiLoCo(Updates):
    """Each worker steps alone; every some steps, an outer optimizer steps along the mean way.

    What weights have changed by since the last outer step, averaged over the workers and negated,
    is the gradient that the outer optimizer applies to the weights as they were then.

    With `fragments`, the variables are dealt into as many parts, and each has its outer step at a
    time of its own, so that no step sends everything. With `overlap_steps`, what a part has changed
    by is sent while so many further steps are computed, and the outer step comes after them; the
    part is then `alpha` times the worker's own weights plus `1 - alpha` times the new common ones
    (Streaming DiLoCo).

    Args:
        every: Steps between two outer steps of a variable.
        outer_optimizer: Function without arguments that makes a Keras optimizer, the name or the
            `keras.optimizers.serialize` of one, or an optimizer to be copied (an optimizer's
            variables start TensorFlow, which a strategy of several workers does not allow). By
            default `SGD(0.7, momentum=0.9, nesterov=True)`.
        fragments: Number of parts, at most 10,000; `every` must be divisible by it.
        overlap_steps: Steps that go on while a part is sent; below `every / fragments`.
        alpha: Part of a worker's own weights after an outer step, in [0, 1). By default 0.5 with
            `overlap_steps`, else 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.DiLoCo(
            100, outer_optimizer=lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True)
        ),
        compression="int8",
    )
    ```

    Reference: [Douillard et al., 2023](https://arxiv.org/abs/2311.08105);
    [Douillard et al., 2025](https://arxiv.org/abs/2501.18512) for streaming.
    """

    local = True
    start_step, average_slots = 0, False

    def __init__(
        self,
        every: int,
        outer_optimizer: Callable[[], keras.optimizers.Optimizer]
        | keras.optimizers.Optimizer
        | str
        | dict[str, Any] = nesterov,
        fragments: int = 1,
        overlap_steps: int = 0,
        alpha: float | None = None,
    ) -> None:
        self.every = every = whole_number("every", every, 1)
        self.fragments = fragments = whole_number("fragments", fragments, 1, most=10_000)
        self.overlap_steps = overlap_steps = whole_number("overlap_steps", overlap_steps, 0)
        if every % fragments:
            raise ValueError(
                "`every` must be divisible by `fragments`. "
                f"Received: every={every!r}, fragments={fragments!r}"
            )
        if overlap_steps >= every // fragments:
            raise ValueError(
                f"`overlap_steps` must be below every / fragments = {every // fragments}, so that "
                f"one part is under way at a time. Received: overlap_steps={overlap_steps!r}"
            )
        if alpha is None:
            alpha = 0.5 if overlap_steps else 0.0
        number("alpha", alpha, "in [0, 1)", lambda a: 0 <= a < 1)
        if not (
            callable(outer_optimizer)
            or isinstance(outer_optimizer, (str, dict, keras.optimizers.Optimizer))
        ):
            raise ValueError(
                "`outer_optimizer` must be a function without arguments that makes a Keras "
                "optimizer, the name or the serialized form of one, or an optimizer. "
                f"Received: outer_optimizer={shown(outer_optimizer)}"
            )
        _check_name(outer_optimizer)
        self.outer_optimizer = outer_optimizer
        self.alpha = float(alpha)

    def on_build(
        self, variables: list[keras.Variable]
    ) -> list[tuple[list[keras.Variable], keras.optimizers.Optimizer | None]]:
        parts = assign_to_fragments(variables, self.fragments)
        outers = [self.make_outer_optimizer() for _ in parts]
        for part, outer in zip(parts, outers):
            outer.build(part)
        return list(zip(parts, outers))

    def on_replica(self, context: Context) -> LocalSteps:
        return LocalSteps(self, context)

    def make_outer_optimizer(self) -> keras.optimizers.Optimizer:
        """Makes an outer optimizer, with its own variables.

        Returns:
            A `keras.optimizers.Optimizer`.

        Raises:
            ValueError: If `outer_optimizer` makes something else, or one that would not step
                each time.
        """
        given = self.outer_optimizer
        if isinstance(given, keras.optimizers.Optimizer):
            made = type(given).from_config(given.get_config())
        elif callable(given):
            made = given()
        else:
            made = keras.optimizers.get(given)
        if (
            not isinstance(made, keras.optimizers.Optimizer)
            or isinstance(made, keras.optimizers.LossScaleOptimizer)
            or made.gradient_accumulation_steps
        ):
            raise ValueError(
                "`outer_optimizer` must make a Keras optimizer without a loss scale and without "
                f"`gradient_accumulation_steps`. Received: outer_optimizer={given!r}, which makes "
                f"{made!r}"
            )
        return made


def _check_name(outer_optimizer: Any) -> None:
    """Raises ValueError for a name, or a serialized form, that Keras does not know.

    Making the optimizer would tell as well, and start TensorFlow.
    """
    name = outer_optimizer
    if isinstance(name, dict):
        name = name.get("class_name")
    elif not isinstance(name, str):
        return
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    known = {k.__name__.lower() for k in kinds if issubclass(k, keras.optimizers.Optimizer)}
    is_known = isinstance(name, str) and (
        name.lower() in known or keras.saving.get_registered_object(name) is not None
    )
    if not is_known:
        raise ValueError(
            '`outer_optimizer` must name an optimizer of Keras\'s, such as "sgd", or have its '
            f"`class_name`. Received: outer_optimizer={shown(outer_optimizer)}"
        )
