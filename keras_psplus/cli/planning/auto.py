"""Resolution of `--strategy auto` where the command line knows the cluster."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from keras_psplus.catalogue import automatic, entries, lookup
from keras_psplus.cli.flags.parsing import UsageError
from keras_psplus.cli.planning import plan_script
from keras_psplus.cluster.environment import available_cores, plan_tasks
from keras_psplus.planning.best_exact import Chosen, NoPlanError
from keras_psplus.planning.choices import Facts
from keras_psplus.planning.cost_model import Cluster


def is_auto(strategy: str | None) -> bool:
    """Whether a `--strategy` takes another entry by a plan."""
    if strategy is None:
        return False
    return entries.read(lookup.find(strategy)).strategy == entries.AUTO


def by_plan(options: flags.FlagValues, layout: dict[str, int]) -> Chosen | None:
    """Chooses by the plan that `--plan` or the environment names.

    Args:
        layout: Dict with the numbers of `workers` and `ps`, and whether there is a `chief`.

    Returns:
        `Chosen`, or None if there is no plan, and several entries to choose from.

    Raises:
        UsageError: If the plan cannot be used.
    """
    plan = options.plan or os.environ.get(automatic.PLAN_VARIABLE)
    try:
        return automatic.choose(plan, **_counts(layout))
    except NoPlanError:
        return None
    except ValueError as error:
        raise UsageError(f"--strategy auto: {error}") from None


def by_measuring(command: Sequence[str], layout: dict[str, int]) -> Chosen:
    """Measures a script in one process, and chooses for its tasks on this machine.

    Args:
        command: The script and its arguments.
        layout: As of `by_plan`.

    Raises:
        plan_script.ScriptError: If the script gives nothing to plan by.
    """
    counts = _counts(layout)
    computing = counts["workers"] + (0 if counts["ps"] else counts["chief"])
    variables = plan_tasks(**counts)[0].variables
    # With the threads that a task will have.
    variables = {name: text for name, text in variables.items() if name != "TF_CONFIG"}
    workers = max(1, computing)
    answer = plan_script.ask(command, workers=workers, variables=variables)
    facts = Facts.from_json(answer)
    # Tasks that share a core take as much longer.
    shared = max(1.0, (counts["workers"] + counts["chief"]) / available_cores())
    facts = dataclasses.replace(
        facts,
        step_ms=shared * facts.step_ms,
        single_ms=shared * facts.single_ms,
        int8_ms=shared * facts.int8_ms,
    )
    return automatic.choose_by(facts, Cluster(bits_per_second=None), **counts)


def _counts(layout: dict[str, int]) -> dict[str, Any]:
    return {"workers": layout["workers"], "ps": layout["ps"], "chief": bool(layout["chief"])}
