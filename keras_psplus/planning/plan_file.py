"""The file of a plan: what `keras-psplus plan --json` prints, `strategy="auto"` reads."""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import NamedTuple

from keras_psplus.planning.choices import Facts
from keras_psplus.planning.cost_model import Cluster


class PlanFile(NamedTuple):
    """Measurements of a plan, from which another cluster's choice can be computed.

    Attributes:
        facts: Measurements of the model.
        cluster: Cluster that the plan was made for.
    """

    facts: Facts
    cluster: Cluster


def read(path: str | os.PathLike[str]) -> PlanFile:
    """Reads and checks a plan.

    Args:
        path: Path of a file with what `keras-psplus plan --json` has printed.

    Returns:
        `PlanFile`, with a processor that counts once, as `choices.choose` takes it.

    Raises:
        ValueError: If it cannot be read, or is no such plan.
    """
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the plan cannot be read: {error}. Received: {str(path)!r}") from None
    try:
        plan = json.loads(text)
        measured = dict(plan["measured"])
        facts = Facts.from_json({**measured.pop("work"), **measured})
        cluster = Cluster(**{**plan["cluster"], "processor": 1.0})
        _check(facts, cluster)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "a plan is what `keras-psplus plan --json train.py` prints, without --stages. "
            f"{type(error).__name__}: {error}. Received: {path}"
        ) from None
    return PlanFile(facts, cluster)


def _check(facts: Facts, cluster: Cluster) -> None:
    positive = {
        "batch_rows": facts.batch_rows,
        "rows": facts.rows,
        "step_ms": facts.step_ms,
        "single_ms": facts.single_ms,
        "int8_ms": facts.int8_ms,
        "workers": cluster.workers,
    }
    if cluster.bits_per_second is not None:
        positive["bits_per_second"] = cluster.bits_per_second
    for variable in facts.work.variables:
        positive[f"elements of {variable.shape}"] = variable.elements
        if variable.factor_rows is not None:
            positive["factor_rows"] = variable.factor_rows
    for table in facts.work.tables:
        positive |= {"rows of a table": table.rows, "dim of a table": table.dim}
        if not table.touched or not all(rows >= 0 for rows in table.touched.values()):
            raise ValueError(f"touched rows of a table are {table.touched}")
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, and is {value}")
    if not 0 <= cluster.delay_ms < math.inf:
        raise ValueError(f"delay_ms must be 0 or more and finite, and is {cluster.delay_ms}")
