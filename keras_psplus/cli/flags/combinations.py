"""Checks of flags of `run` that conflict, before anything is started."""

from collections.abc import Mapping
from typing import Any

from absl import flags

from keras_psplus import specs
from keras_psplus.catalogue import entries, lookup
from keras_psplus.cli.flags.parsing import UsageError


def check_combination(strategy: str | None, layout: dict[str, int], given: dict[str, str]) -> None:
    """Checks an entry of the catalogue against the cluster and its options.

    Args:
        strategy: The argument of `--strategy`, or None.
        layout: Dict with the numbers of `workers` and `ps`, and whether there is a `chief`.
        given: Dict from `"compression"` and `"updates"` to texts, without those not given.

    Raises:
        ValueError: If they do not go together; the message says what would.
    """
    _check_spec("compression", given, specs.COMPRESSION, specs.COMPRESSION_ALLOWED)
    _check_spec("updates", given, specs.UPDATES, specs.UPDATES_ALLOWED)
    if strategy is None:
        return
    entry = entries.read(lookup.find(strategy))
    _check_layout(entry, layout, strategy)
    problem = lookup.problem_with(entry, given)
    if problem is None and "updates" in given:
        problem = _problem_with_updates(entry, given["updates"])
    if problem is not None:
        received = ", ".join(f"--{name}={text}" for name, text in given.items())
        raise UsageError(f"{strategy} {problem}. Received: --strategy={strategy}, {received}")


def chief_of(options: flags.FlagValues) -> bool:
    """Whether a cluster has a chief: by --chief, its servers, or its strategy.

    Args:
        options: The parsed flags, with `chief`, `ps` and `strategy`.
    """
    if options.chief is not None:
        return bool(options.chief)
    return options.ps > 0 or (
        options.strategy is not None
        and entries.read(lookup.find(options.strategy)).strategy == "PipelineStrategy"
    )


def _check_spec(
    name: str, given: Mapping[str, str], forms: Mapping[str, specs.Form], allowed: str
) -> None:
    if name in given and specs.parse(given[name], forms) is None:
        raise UsageError(f"--{name} must be one of {allowed}. Received: --{name}={given[name]}")


def _check_layout(entry: entries.Entry, layout: Mapping[str, int], strategy: str) -> None:
    workers, ps, chief = layout["workers"], layout["ps"], layout["chief"]
    needed = None
    if entry.strategy in ("MultiWorkerMirroredStrategy", "get_strategy") and ps:
        needed = "has no use for parameter servers: leave out --ps, or take one of " + ", ".join(
            name for name in lookup.names() if "parameter_server" in name or "hybrid" in name
        )
    elif entry.strategy in ("ParameterServerStrategy", "HybridStrategy") and not ps:
        needed = "needs parameter servers: add --ps 1, or take --strategy all_reduce"
    elif entry.strategy == "ParameterServerStrategy" and not (chief and workers):
        needed = "needs a chief and workers beside it: leave out --nochief and --workers 0"
    elif entry.strategy == "PipelineStrategy" and ps:
        needed = "keeps variables on its workers, and has no parameter servers: leave out --ps"
    elif entry.strategy == "PipelineStrategy" and not (chief and workers):
        needed = "needs a chief, and a worker for each stage: leave out --nochief and --workers 0"
    elif entry.strategy == "PipelineStrategy":
        needed = _check_pipelines(entry.options.get("pipelines"), workers)
    if needed:
        received = f"--workers={workers}, --ps={ps}, --{'' if chief else 'no'}chief"
        raise UsageError(f"{strategy} {needed}. Received: --strategy={strategy}, {received}")


def _check_pipelines(pipelines: Any, workers: int) -> str | None:
    if not isinstance(pipelines, int) or pipelines < 1 or workers % pipelines == 0:
        return None
    few, many = workers // pipelines * pipelines, -(-workers // pipelines) * pipelines
    fitting = f"--workers {many}" if few == 0 else f"--workers {few} or {many}"
    return f"has {pipelines} pipelines, each with as many workers: pass {fitting}"


def _problem_with_updates(entry: entries.Entry, text: str) -> str | None:
    name = text.partition(":")[0]
    plain = "take --strategy all_reduce without --ps"
    if entry.strategy == "HybridStrategy" and name != "accumulate":
        return f"takes accumulate alone, as its workers share their tables: {plain}"
    if entry.strategy == "ParameterServerStrategy":
        if name == "diloco":
            return f"takes accumulate and local_sgd, as its workers come one by one: {plain}"
        if entry.options.get("mode") == "sync" or "max_staleness" in entry.options:
            return "takes no updates: they need --strategy async_parameter_server"
    return None
