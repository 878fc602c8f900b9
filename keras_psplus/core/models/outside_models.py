"""Models that were built outside of every strategy's scope, beside a strategy that is live."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from keras_psplus.callbacks import step_report
from keras_psplus.cluster import roles
from keras_psplus.core.base import checks
from keras_psplus.core.base.thread_value import ThreadFlag
from keras_psplus.core.models import live_strategies
from keras_psplus.core.plan import plan_request
from keras_psplus.engine import Call, Engine, answers
from keras_psplus.log import info_once

if TYPE_CHECKING:
    import keras

_TRAINING = ("fit", "train_on_batch")


class OutsideScope(Engine):
    """Engine for models that were built outside of every strategy's scope."""

    def __init__(self) -> None:
        super().__init__()
        # Raised while a file is loaded: what its model is compiled with need not be used.
        self.loading = ThreadFlag()

    @answers("compile")
    def _compile(self, call: Call) -> Any:
        if not self._is_left_to_fit():
            check_built_in_scope(call.owner, "compile")
        return call.proceed()

    @answers("fit", "train_on_batch", "evaluate", "test_on_batch")
    def _train(self, call: Call) -> Any:
        if not live_strategies.in_single_process():
            if call.name in _TRAINING:
                roles.refuse_training(call.name)
            plan_request.before_training(None, call)
        check_built_in_scope(call.owner, call.name)
        return call.proceed()

    @answers("predict", "predict_on_batch")
    def _predict(self, call: Call) -> Any:
        # Right in each process, but not distributed.
        note_prediction(call.owner, call.name)
        return call.proceed()

    def apply(self, call: Call) -> Any:
        """Refuses an optimizer in a step of a strategy that it was not made for."""
        checks.refuse_optimizer(call.owner)

    @answers("set_model")
    def _set_model(self, event: Call) -> Any:
        if not live_strategies.exist():  # Else this is not the job's training.
            step_report.add(event.owner)
        return event.proceed()

    def _is_left_to_fit(self) -> bool:
        """Whether `compile` may be of a model that is never trained.

        One that is loaded from a file may be for `predict` alone. A tuner's constructor builds a
        model to see its hyperparameters, before it has looked at its `distribution_strategy`.
        """
        return bool(self.loading) or "keras_tuner" in sys.modules


def load(call: Call) -> Any:
    """Compiles a model with what its file says."""
    assert isinstance(call.engine, OutsideScope)
    with call.engine.loading.raised():
        return call.proceed()


def check_built_in_scope(model: keras.Model, method: str) -> None:
    """Raises if the model was built outside the strategy's scope.

    Args:
        method: Name of its method that is called.

    Raises:
        ValueError: If the model was built outside of every strategy's scope while a strategy
            distributes training, and not in `single_process`.
    """
    if not _is_outside(model):
        return
    live_strategies.forget_unused()
    if not live_strategies.exist():
        return
    tuner = ""
    if "keras_tuner" in sys.modules:
        tuner = " Give KerasTuner's tuner `distribution_strategy=strategy`."
    raise _kind_of_error()(
        f"The model '{model.name}' was built outside the strategy's scope, so every process would "
        f"train and evaluate its own copy alone. Build and compile it under "
        f"`with strategy.scope():`.{tuner} If that is what you want of it, as of a baseline or a "
        f"distillation teacher, call `{method}` under `with keras_psplus.single_process():`. "
        f"Received: {method}() of {model}"
    )


def note_prediction(model: keras.Model, method: str) -> None:
    """Says once that a model predicts in each process by itself: right, but not distributed."""
    if _is_outside(model):
        info_once(
            "%s: the model '%s' was built outside the strategy's scope, so each process that calls "
            "it predicts all rows itself (no line under `with keras_psplus.single_process():`)",
            method,
            model.name,
        )


def _is_outside(model: keras.Model) -> bool:
    return (
        getattr(model, "_distribute_strategy", None) is None
        and not live_strategies.in_single_process()
        and live_strategies.exist()
    )


def _kind_of_error() -> type[Exception]:
    # KerasTuner goes on to the next trial after all other errors, without a word.
    errors = getattr(sys.modules.get("keras_tuner"), "errors", None)
    return getattr(errors, "FatalValueError", ValueError)
