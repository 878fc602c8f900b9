"""Models that were built outside of every strategy's scope, beside a strategy that is live."""

import sys

from keras.src.legacy.saving import legacy_h5_format
from keras.src.trainers import trainer as base_trainer

from keras_psplus import live_strategies
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.log import info_once
from keras_psplus.thread_flag import ThreadFlag

# Raised while a file is loaded: what its model is compiled with need not be used.
_loading = ThreadFlag()


def install():
    """Installs this module's hooks."""
    replace(base_trainer.Trainer, "compile_from_config", ["self", "config"])(_load)
    replace(legacy_h5_format, "load_model_from_hdf5", ["filepath"])(_load)


def check(model, method):
    """Refuses what a model would do in each process by itself, by mistake.

    Args:
        model: Keras model.
        method: Name of its method that is called.

    Raises:
        ValueError: If the model was built outside of every strategy's scope while a strategy
            distributes training, and not in `single_process`.
    """
    if not _is_outside(model) or _is_left_to_fit(method):
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


def note_prediction(model, method):
    """Says once that a model predicts in each process by itself: right, but not distributed."""
    if _is_outside(model):
        info_once(
            "%s: the model '%s' was built outside the strategy's scope, so each process that calls "
            "it predicts all rows itself (no line under `with keras_psplus.single_process():`)",
            method,
            model.name,
        )


def _is_outside(model):
    return (
        getattr(model, "_distribute_strategy", None) is None
        and not live_strategies.in_single_process()
        and live_strategies.exist()
    )


def _load(original, *args, **kwargs):
    with _loading.raised():
        return original(*args, **kwargs)


def _is_left_to_fit(method):
    """Whether `compile` may be of a model that is never trained.

    One that is loaded from a file may be for `predict` alone. A tuner's constructor builds a model
    to see its hyperparameters, before it has looked at its `distribution_strategy`.
    """
    return method == "compile" and (bool(_loading) or "keras_tuner" in sys.modules)


def _kind_of_error():
    # KerasTuner goes on to the next trial after all other errors, without a word.
    errors = getattr(sys.modules.get("keras_tuner"), "errors", None)
    return getattr(errors, "FatalValueError", ValueError)
