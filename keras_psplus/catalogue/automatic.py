"""`strategy("auto")`: the entry of the catalogue that a plan finds best for this cluster."""

from __future__ import annotations

import os
from typing import Any

from keras_psplus.catalogue import entries, lookup
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.discovery.discovery import find_task_config
from keras_psplus.log import logger
from keras_psplus.planning import best_exact, plan_file
from keras_psplus.planning.best_exact import Chosen, NoPlanError
from keras_psplus.planning.choices import Facts
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.traits import Traits, traits_of

PLAN_VARIABLE = "KERAS_PSPLUS_PLAN_FILE"
_REMEDY = (
    "Start the script by `keras-psplus run --strategy auto`, which measures it first; or write "
    "`keras-psplus plan --json train.py > plan.json`, and name that file, the same for all tasks, "
    f"in {PLAN_VARIABLE} (or with `--plan`)"
)


def best_exact_strategy(plan: str | os.PathLike[str] | None = None) -> Any:
    """Makes the strategy that is predicted to be the fastest in this cluster.

    Entries that train otherwise than one process does (lossy, stale, local
    steps, larger batches) are left out. A cluster of workers allows those
    of all-reduce, one with `ps` tasks those of parameter servers and hybrid.
    The chief logs which entry it is, and why.

    Example:

    ```python
    strategy = keras_psplus.strategy_from_env("auto", plan="plan.json")
    with strategy.scope():
        model = ...
    ```

    Args:
        plan: Path of the output of `keras-psplus plan --json`; by default,
            what the environment's KERAS_PSPLUS_PLAN_FILE names. What was
            measured there is taken for the numbers of tasks here; links are
            those of the plan.

    Returns:
        What the entry's `strategy()` returns; TensorFlow's default strategy
        without a cluster.

    Raises:
        ValueError: If there is no plan, and several entries to choose from; if
            the plan cannot be used; or if the workers' plans differ.
    """
    task = find_task_config()
    try:
        chosen = choose(plan or os.environ.get(PLAN_VARIABLE), **counts_of(task))
    except NoPlanError as error:
        raise ValueError(f"{_REMEDY}. {error}") from None
    if task is None or task.is_chief:
        logger.info("%s", chosen)
    made = lookup.load(chosen.entry).strategy()
    _check_all_agree(made, chosen.entry)
    return made


def choose(plan: str | os.PathLike[str] | None, *, workers: int, ps: int, chief: bool) -> Chosen:
    """Chooses an entry for a cluster.

    Raises:
        NoPlanError: If there is something to choose, and no plan.
        ValueError: If the plan cannot be used.
    """
    facts, link = plan_file.read(plan) if plan else (None, Cluster())
    return choose_by(facts, link, workers=workers, ps=ps, chief=chief)


def choose_by(facts: Facts | None, link: Cluster, *, workers: int, ps: int, chief: bool) -> Chosen:
    """Chooses by what was measured of a model, with other arguments as of `choose`."""
    if workers + chief <= 1 and not ps:
        return Chosen("single", "as one process trains alone")
    return best_exact.choose(facts, link, planned(), workers=workers, ps=ps, chief=chief)


def planned() -> dict[str, Traits]:
    """The entries that a plan predicts, by their names; those of pipelines are planned apart."""
    found = {name: lookup.find(name) for name in lookup.names()}
    apart = ("PipelineStrategy", entries.AUTO)
    return {
        name: traits_of(path.read_text())
        for name, path in found.items()
        if entries.read(path).strategy not in apart
    }


def counts_of(task: TaskConfig | None) -> dict[str, Any]:
    """The arguments of `choose` that a cluster makes."""
    cluster = task.cluster if task else {}
    return {
        "workers": len(cluster.get("worker", ())),
        "ps": len(cluster.get("ps", ())),
        "chief": "chief" in cluster,
    }


def _check_all_agree(made: Any, entry: str) -> None:
    """Refuses workers whose plans, on separate disks, have chosen differently."""
    control = getattr(getattr(made, "extended", None), "control", None)
    if control is None:
        return
    chosen = dict(zip(control.names, control.exchange("auto", entry)))
    if len(set(chosen.values())) > 1:
        raise ValueError(
            f"strategy='auto' has to take the same entry on all workers: give all of them the same "
            f"plan. Received: {', '.join(f'{entry} on {name}' for name, entry in chosen.items())}"
        )
