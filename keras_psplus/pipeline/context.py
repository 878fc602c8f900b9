"""The objects of a strategy that its steps are made with."""

import dataclasses
from typing import Any, Protocol

import keras

from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.replicas import Copies
from keras_psplus.pipeline.split.splitter import Splitter, Variables
from keras_psplus.pipeline.step.times import StageTimes
from keras_psplus.pipeline.traffic import PipelineTraffic
from keras_psplus.tf_internals import context as tf_context


class UnderWay(Protocol):
    """Training steps that have begun and not ended."""

    def finish(self) -> Any:
        """Ends them; returns the logs of the last one."""

    def has(self, variable: keras.Variable) -> bool:
        """Whether a variable is one that they may read or change."""


@dataclasses.dataclass(eq=False)
class PipelineContext:
    """The objects of a `PipelineStrategy` that its steps are made with.

    Parts take this, or what they use of it, instead of the strategy, which makes all of them.

    Attributes:
        copies: Copies of weights, with several pipelines.
        times: Seconds of steps by task.
        under_way: Training steps that have begun and not ended, or None.
    """

    stages: Stages
    splitter: Splitter
    variables: Variables
    copies: Copies
    traffic: PipelineTraffic
    times: StageTimes
    under_way: UnderWay | None = None
    # Whether variables were given values since the last step began.
    _has_written: bool = False

    def finish_writes(self) -> None:
        """Waits until the workers have done what was written to their variables.

        To be called before a step. A chief sends eager operations and goes on, and nothing orders
        them before the parts of a function that runs on the same worker.
        """
        if self._has_written:
            self._has_written = False
            tf_context.context().sync_executors()

    def note_written(self) -> None:
        """Notes that variables were given values outside of steps."""
        self._has_written = True
