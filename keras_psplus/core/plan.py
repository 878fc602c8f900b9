"""Requests of `keras-psplus plan` to the script that it starts.

The command sets an environment variable. The first call of `fit` then writes an answer to a file
and exits without training. With a number of stages, all stages of a `PipelineStrategy` are placed
on this process's CPU, and the answer is their plan, made before any weight is created. Without a
number of stages, the answer is the measurement of some steps of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.catalogue import PLAN_REQUEST_VARIABLE
from keras_psplus.compression.outer_products import find_outer_product
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import epoch_iterator, tree

# Measures a script's model in one process, for `keras-psplus plan`.
#
# Step times, and the sizes of gradients.


# Steps that are taken to be timed, after those in which TensorFlow prepares them.
_FIRST, _STEPS, _SECONDS = 2, 20, 5.0
# Batches of one worker whose distinct rows are counted, together and one by one.
_BATCHES = 8
_OF_FIT = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")


def measure(
    fit: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any, workers: int
) -> dict[str, Any]:
    """Runs some steps of a model with one worker's batch and with the global one.

    Returns:
        What `keras_psplus.planning.Facts` holds, as JSON has it.
    """
    whole = _dataset(fit, model, args, kwargs)
    batch = next(iter(whole.take(1)), None)
    if batch is None:
        raise ValueError("fit() was called without any data to plan for. Received: no batch")
    batch_rows = _rows(batch)
    rows = max(1, math.ceil(batch_rows / workers))
    own = whole.unbatch().batch(rows, drop_remainder=True).take(_BATCHES).cache()
    # XLA compiles no collectives: beside them a step takes as long as without it.
    model.jit_compile = False
    step_ms = _milliseconds(fit, model, own.repeat())
    single_ms = step_ms
    if batch_rows > rows:
        # Others use the processor as well, but more rows never take less time.
        all_ms = _milliseconds(fit, model, whole.take(_BATCHES).cache().repeat())
        single_ms = max(all_ms, step_ms)
    variables, tables = _gradients(model, list(own))
    return {
        "model": model.name,
        "batch_rows": batch_rows,
        "rows": rows,
        "step_ms": step_ms,
        "single_ms": single_ms,
        "variables": variables,
        "tables": tables,
        "slots": _slots(model),
    }


def _dataset(
    fit: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any
) -> tf.data.Dataset:
    given = inspect.signature(fit).bind(model, *args, **kwargs).arguments
    data = {name: given[name] for name in _OF_FIT if given.get(name) is not None}
    return epoch_iterator.EpochIterator(**data).data_adapter.get_tf_dataset()


def _rows(batch: Any) -> int:
    first = next(leaf for leaf in tree.flatten(batch) if leaf is not None)
    return int(first.nrows() if isinstance(first, tf.RaggedTensor) else first.shape[0])


class _Timer(keras.callbacks.Callback):
    """Notes when steps end, and stops after enough of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[int, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append((batch, time.perf_counter()))
        late = self.ends[-1][1] - self.ends[0][1] > _SECONDS
        if late and len(self.ends) > _FIRST + 2:
            self.model.stop_training = True


def _milliseconds(fit: Callable[..., Any], model: keras.Model, dataset: tf.data.Dataset) -> float:
    """A step's milliseconds: of the faster half the median, as others use the processor, too."""
    timer = _Timer()
    together = max(1, int(model.steps_per_execution))
    steps = _FIRST + math.ceil(_STEPS / together)
    fit(model, dataset, steps_per_epoch=steps * together, verbose=0, callbacks=[timer])
    pairs = list(zip(timer.ends, timer.ends[1:]))[_FIRST - 1 :]
    times = [(end - start) / (later - former) for (former, start), (later, end) in pairs]
    return 1e3 * statistics.median(sorted(times)[: math.ceil(len(times) / 2)])


def _gradients(
    model: keras.Model, batches: Sequence[Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found: dict[str, tuple[list[int], int | None]] = {}
    sparse: dict[str, list[int]] = {}

    def record(gradients: Any, variables: Any) -> dict[str, tf.Tensor]:
        indices = {}
        for gradient, variable in zip(gradients, variables):
            key = f"{variable.path} {id(variable)}"  # Layers of one name may be in two models.
            if isinstance(gradient, tf.IndexedSlices):
                sparse[key] = [int(n) for n in variable.shape]
                indices[key] = tf.reshape(gradient.indices, [-1])
            elif gradient is not None:
                product = find_outer_product(gradient)
                rows = None if product is None else product.left.shape[0]
                found[key] = [int(n) for n in variable.shape], rows
        return indices

    def step(batch: Any) -> dict[str, tf.Tensor]:
        rows: dict[str, tf.Tensor] = {}
        with _recording(model, lambda *given: rows.update(record(*given))):
            model.train_step(batch)
        return rows

    strategy = model.distribute_strategy
    function = tf.function(
        lambda batch: strategy.run(step, args=(batch,)), autograph=False, reduce_retracing=False
    )
    drawn = [function(batch) for batch in batches]
    if not found and not sparse:
        raise ValueError(
            "no optimizer of the model was given gradients in a train step, so there is nothing "
            f"to plan. Received: {model} with optimizers {sorted(optimizers_of(model))}"
        )
    variables = [{"shape": shape, "factor_rows": rows} for shape, rows in found.values()]
    tables = [
        {
            "rows": shape[0],
            "dim": math.prod(shape[1:]),
            "touched": _touched([one[key].numpy() for one in drawn]),
        }
        for key, shape in sparse.items()
    ]
    return variables, tables


def _touched(indices: Sequence[np.ndarray[Any, Any]]) -> dict[str, float]:
    """Distinct rows in 1, 2, 4 and so on batches, on average."""
    counts, batches = {}, 1
    while batches <= len(indices):
        starts = range(0, len(indices) - batches + 1, batches)
        groups = [np.concatenate(indices[start : start + batches]) for start in starts]
        counts[str(batches)] = float(np.mean([np.unique(group).size for group in groups]))
        batches *= 2
    return counts


@contextlib.contextmanager
def _recording(model: keras.Model, record: Callable[[Any, Any], None]) -> Iterator[None]:
    """Calls a function with gradients and variables where optimizers would apply them."""
    optimizers = [model.optimizer, *optimizers_of(model).values()]
    optimizers = list({id(one): one for one in optimizers}.values())

    def apply(optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
        def applied(grads: Any, trainable_variables: Any = None, **_: Any) -> None:
            record(grads, trainable_variables or optimizer._trainable_variables)

        return applied

    for optimizer in optimizers:
        object.__setattr__(optimizer, "apply", apply(optimizer))
    try:
        yield
    finally:
        for optimizer in optimizers:
            object.__delattr__(optimizer, "apply")


def _slots(model: keras.Model) -> float:
    weights = sum(math.prod(v.shape) for v in model.trainable_variables)
    kept = sum(math.prod(v.shape) for v in model.optimizer.variables if v.shape)
    return kept / weights if weights else 0.0


VARIABLE = PLAN_REQUEST_VARIABLE


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A request for a plan of stages, or for a measurement.

    Attributes:
        stages: Number of stages; None for the measurement.
        microbatches: Number of micro-batches instead of the script's, or None.
        schedule: Name of the schedule instead of the script's, or None.
        workers: Number of workers that are to share a batch.
    """

    file: str
    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    workers: int = 1

    def answer(self, answer: dict[str, Any]) -> NoReturn:
        """Writes an answer, as JSON, and ends the process."""
        pathlib.Path(self.file).write_text(json.dumps(answer))
        raise SystemExit(0)


def read() -> PlanRequest | None:
    """Reads this process's request; None if the process is to train."""
    given = os.environ.get(VARIABLE)
    return PlanRequest(**json.loads(given)) if given else None


def stand_in() -> tf.distribute.Strategy | None:
    """Strategy used instead of one that needs a cluster; None without a request."""
    request = read()
    return tf.distribute.get_strategy() if request and request.stages is None else None


def before_training(strategy: tf.distribute.Strategy | None, call: Call) -> None:
    """Answers a request, when a method that trains is called; returns if there is none."""
    request = read()
    if request is None:
        return
    has_stages = hasattr(strategy, "num_stages")
    if request.stages is not None:
        if not has_stages:
            raise ValueError(
                "`keras-psplus plan --stages` makes the plan of a pipeline. Build the model under "
                "`with strategy.scope():`, with `strategy = keras_psplus.strategy_from_env()` or "
                f"`keras_psplus.PipelineStrategy()`. Received: fit() of a model of {strategy}"
            )
        return  # The model is cut, and the plan of that is the answer.
    if call.name not in ("fit", "train_on_batch"):
        return
    if has_stages or call.name != "fit":
        raise ValueError(
            "`keras-psplus plan` measures a model that `fit` trains as a whole: build it under "
            "`keras_psplus.strategy_from_env()`, call `fit`, or say --stages for the plan of a "
            f"pipeline. Received: {call.name}() of a model of {strategy}"
        )
    given = call.original, call.owner, call.args, call.kwargs
    request.answer(measure(*given, request.workers))


def override(microbatches: Any, schedule_name: Any) -> tuple[Any, Any]:
    """The strategy's arguments, or what is asked for in their place."""
    request = read()
    if request is None:
        return microbatches, schedule_name
    return request.microbatches or microbatches, request.schedule or schedule_name
