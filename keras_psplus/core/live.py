"""Strategies that distribute training in this process, and models built outside of them."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_psplus import activation
from keras_psplus.callbacks import add_step_report
from keras_psplus.cluster.discovery import find
from keras_psplus.core import plan
from keras_psplus.core.base import checks
from keras_psplus.core.base.threads import ThreadFlag
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.engine import Call, Engine, answers, engine_of
from keras_psplus.log import info_once
from keras_psplus.tf_internals import distributed_values, values_util

# Registry of the strategies that distribute training in this process.
#
# A strategy's constructor registers it. From then on a model that was built outside of every scope
# would train on each worker by itself, from other initial weights, so the hooks refuse it unless
# the script asks for that with `single_process`.

_live: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
# A process cannot leave its cluster: these count until it ends.
_of_clusters: list[tf.distribute.Strategy] = []
_COLLECTIONS = 3

_single = ThreadFlag()


def note(strategy: tf.distribute.Strategy, in_cluster: bool) -> None:
    """Notes that a strategy distributes training in this process."""
    _live.add(strategy)
    if in_cluster:
        _of_clusters.append(strategy)


def exist() -> bool:
    """Whether there is a strategy that distributes training in this process."""
    return bool(_live)


def forget_unused() -> None:
    """Collects strategies that are no longer referenced."""
    if not _of_clusters:
        # Objects freed by one collection may have held those of the next.
        for _ in range(_COLLECTIONS):
            if not gc.collect():
                break


def in_single_process() -> bool:
    """Whether this thread is in a context of `single_process`."""
    return bool(_single)


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Context in which models from outside a strategy's scope train locally.

    Beside a strategy that distributes training, `compile`, `fit`, `train_on_batch`, `evaluate` and
    `test_on_batch` refuse such models: each worker would train a separate copy, by mistake. In this
    context they work as without the strategy: every process trains or evaluates its copy on all of
    its data, without communication. `predict` does so outside of the context as well, and logs a
    line. Models that were built in the strategy's scope are trained by the strategy here, too. The
    context holds for the thread that has entered it.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    with keras_psplus.single_process():
        baseline = keras.Sequential([keras.layers.Dense(10)])
        baseline.compile(optimizer="sgd", loss="mse")
        baseline.fit(x, y)
    ```
    """
    activation.activate()
    with _single.raised():
        yield


# Models that were built outside of every strategy's scope, beside a strategy that is live.

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
        if not in_single_process():
            if call.name in _TRAINING:
                find.refuse_training(call.name)
            plan.before_training(None, call)
        check_built_in_scope(call.owner, call.name)
        return call.proceed()

    @answers("predict", "predict_on_batch")
    def _predict(self, call: Call) -> Any:
        # Right in each process, but not distributed.
        note_prediction(call.owner, call.name)
        return call.proceed()

    def gradient(self, call: Call) -> Any:
        """Refuses mirrored variables, of which a scope has no single copy."""
        for source in tf.nest.flatten(call.get("sources")):
            source = getattr(source, "_value", source)
            is_mirrored = isinstance(source, distributed_values.DistributedVariable)
            if is_mirrored and values_util.get_current_replica_id_as_int() is None:
                raise ValueError(
                    "A tape has no gradients of variables in `strategy.scope()`: call "
                    "`tape.gradient` outside of it, or in a step (`train_step`, `strategy.run`). "
                    f"Received: sources with '{source.name}'"
                )
        return call.proceed()

    def apply(self, call: Call) -> Any:
        """Refuses a step in a scope, and one by an optimizer from outside."""
        optimizer, variables = call.owner, call.get("trainable_variables")
        if variables is None:
            variables = getattr(optimizer, "_trainable_variables", ())
        in_scope = tf.distribute.in_cross_replica_context()
        if in_scope and engine_of(getattr(optimizer, "_distribution_strategy", None)) is not None:
            raise ValueError(
                "An optimizer takes no step in `strategy.scope()`: call `apply` outside of it, or "
                "in a step (`train_step`, `strategy.run`). "
                f"Received: optimizer='{optimizer.name}'"
            )
        if in_step() or any(getattr(v, "_made_by", None) is not None for v in variables):
            checks.refuse_optimizer(optimizer)
        return call.proceed()

    @answers("set_model")
    def _set_model(self, event: Call) -> Any:
        if not exist():  # Else this is not the job's training.
            add_step_report(event.owner)
        return event.proceed()

    def _is_left_to_fit(self) -> bool:
        """Whether `compile` may be of a model that is never trained.

        One that is loaded from a file may be for `predict` alone. A tuner's constructor builds a
        model to see its hyperparameters, before it has looked at its `distribution_strategy`.
        """
        return bool(self.loading) or "keras_tuner" in sys.modules


def in_step() -> bool:
    """Whether this thread is in a step of a strategy of this library."""
    if current_step() is not None:
        return True
    is_ours = engine_of(tf.distribute.get_strategy()) is not None
    return is_ours and not tf.distribute.in_cross_replica_context()


def load(call: Call) -> Any:
    """Compiles a model with what its file says."""
    assert isinstance(call.engine, OutsideScope)
    with call.engine.loading.raised():
        return call.proceed()


def check_built_in_scope(model: keras.Model, method: str) -> None:
    """Raises if the model was built outside the strategy's scope."""
    if not _is_outside(model):
        return
    forget_unused()
    if not exist():
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
            "it predicts all rows itself (`with keras_psplus.single_process():` hides this line)",
            method,
            model.name,
        )


def _is_outside(model: keras.Model) -> bool:
    return (
        getattr(model, "_distribute_strategy", None) is None and not in_single_process() and exist()
    )


def _kind_of_error() -> type[Exception]:
    # KerasTuner goes on to the next trial after all other errors, without a word.
    errors = getattr(sys.modules.get("keras_tuner"), "errors", None)
    return getattr(errors, "FatalValueError", ValueError)
