"""Models that were built outside of every strategy's scope, beside a strategy that is live."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from keras_psplus.callbacks import step_report
from keras_psplus.cluster import roles
from keras_psplus.core.base import checks
from keras_psplus.core.base.thread_flag import ThreadFlag
from keras_psplus.core.models import live_strategies
from keras_psplus.core.plan import plan_request
from keras_psplus.engine import Engine, Original
from keras_psplus.log import info_once

if TYPE_CHECKING:
    import keras

_TRAINING = ("fit", "train_on_batch")


class OutsideScope(Engine):
    """Engine for models that were built outside of every strategy's scope."""

    def __init__(self) -> None:
        super().__init__()
        # Raised while a file is loaded: what its model is compiled with need not be used.
        self._loading = ThreadFlag()

    def compile_loaded(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Compiles a model with what its file says."""
        with self._loading.raised():
            return original(*args, **kwargs)

    def compile(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """`Model.compile`."""
        if not self._is_left_to_fit():
            check_built_in_scope(model, "compile")
        return original(model, *args, **kwargs)

    def train(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """`fit` and `train_on_batch`."""
        if not live_strategies.in_single_process():
            if original.__name__ in _TRAINING:
                roles.refuse_training(original.__name__)
            plan_request.before_training(None, original, model, args, kwargs)
        check_built_in_scope(model, original.__name__)
        return original(model, *args, **kwargs)

    evaluate = train

    def predict(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """`predict` and `predict_on_batch`: right in each process, but not distributed."""
        note_prediction(model, original.__name__)
        return original(model, *args, **kwargs)

    def apply(
        self, original: Original, optimizer: keras.optimizers.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """`Optimizer.apply` in a step of a strategy that the optimizer was not made for."""
        checks.refuse_optimizer(optimizer)

    def set_callbacks_model(
        self, original: Original, callbacks: keras.callbacks.CallbackList, model: keras.Model
    ) -> Any:
        """Gives a list of callbacks its model."""
        if not live_strategies.exist():  # Else this is not the job's training.
            step_report.add(callbacks)
        return original(callbacks, model)

    def _is_left_to_fit(self) -> bool:
        """Whether `compile` may be of a model that is never trained.

        One that is loaded from a file may be for `predict` alone. A tuner's constructor builds a
        model to see its hyperparameters, before it has looked at its `distribution_strategy`.
        """
        return bool(self._loading) or "keras_tuner" in sys.modules


def check_built_in_scope(model: keras.Model, method: str) -> None:
    """Raises if the model was built outside the strategy's scope.

    Args:
        model: Keras model.
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
