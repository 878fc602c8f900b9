"""Requests of `keras-psplus plan` to the script that it starts.

The command sets an environment variable. The first call of `fit` then writes an answer to a file
and exits without training. With a number of stages, all stages of a `PipelineStrategy` are placed
on this process's CPU, and the answer is their plan, made before any weight is created. Without a
number of stages, the answer is the measurement of some steps of the model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, NoReturn

import tensorflow as tf

from keras_psplus.cluster.launcher import launch_flags
from keras_psplus.core.plan import plan_measurement
from keras_psplus.engine import Call

VARIABLE = launch_flags.PLAN_REQUEST_VARIABLE


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
    """Answers a request, when a method that trains is called; returns if there is none.

    Args:
        call: The call of the model's method.

    Raises:
        ValueError: If a plan was asked for that this call has nothing for.
    """
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
    request.answer(plan_measurement.measure(*given, request.workers))


def override(microbatches: Any, schedule_name: Any) -> tuple[Any, Any]:
    """The strategy's arguments, or what is asked for in their place."""
    request = read()
    if request is None:
        return microbatches, schedule_name
    return request.microbatches or microbatches, request.schedule or schedule_name
