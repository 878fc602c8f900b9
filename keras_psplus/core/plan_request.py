"""What `keras-psplus plan` asks of the script that it starts: a plan, and no training.

The command sets an environment variable. Then the stages of a `PipelineStrategy` are this process's
one CPU, taken several times, and the first call of `fit` writes the plan to a file and ends the
process, before any weight is made.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, NoReturn

VARIABLE = "KERAS_PSPLUS_PLAN"


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        stages: Number of stages.
        file: Path of the file for the plan.
        microbatches: Number of micro-batches instead of the script's, or None.
        schedule: Name of the schedule instead of the script's, or None.
    """

    stages: int
    file: str
    microbatches: int | None = None
    schedule: str | None = None

    def answer(self, plan: Any) -> NoReturn:
        """Writes the plan and ends the process.

        Args:
            plan: `keras_psplus.pipeline.Plan`.
        """
        answer = {"text": str(plan), "plan": plan.as_dict()}
        pathlib.Path(self.file).write_text(json.dumps(answer))
        raise SystemExit(0)


def read() -> PlanRequest | None:
    """What is asked of this process; None if it is to train."""
    given = os.environ.get(VARIABLE)
    return PlanRequest(**json.loads(given)) if given else None


def check_strategy(strategy: Any) -> None:
    """Refuses to train what was to be planned, when `fit` is called.

    Args:
        strategy: The strategy of the model, or None.

    Raises:
        ValueError: If a plan was asked for, and the strategy has no stages.
    """
    if read() is not None and not hasattr(strategy, "num_stages"):
        raise ValueError(
            "`keras-psplus plan --stages` makes the plan of a pipeline. Build the model under "
            "`with strategy.scope():`, with `strategy = keras_psplus.strategy()` or "
            f"`keras_psplus.PipelineStrategy()`. Received: fit() of a model of {strategy}"
        )


def override(microbatches: Any, schedule_name: Any) -> tuple[Any, Any]:
    """The strategy's arguments, or what is asked for in their place."""
    request = read()
    if request is None:
        return microbatches, schedule_name
    return request.microbatches or microbatches, request.schedule or schedule_name
