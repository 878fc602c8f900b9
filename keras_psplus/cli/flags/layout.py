"""Numbers of tasks of `run`: its flags --workers, --ps, --chief and --evaluator."""

from __future__ import annotations

import re
from typing import Any

from absl import flags

from keras_psplus.catalogue import entries, lookup
from keras_psplus.cli.flags import combinations
from keras_psplus.cli.flags.parsing import UsageError

# Each has a port, and the launcher two open files for it.
_MOST_TASKS = 1000


def read(options: flags.FlagValues) -> tuple[dict[str, Any], int | None]:
    """Reads the numbers of tasks.

    Args:
        options: The parsed flags.

    Returns:
        Dict of arguments of `plan_tasks`, and how many workers begin if others are to join and
        leave, else None.

    Raises:
        UsageError: If they make no cluster.
    """
    chief = combinations.chief_of(options)
    least, workers = workers_of(options.workers)
    if workers is None:
        workers = len(options.hosts) - options.ps - chief if options.hosts else 2
    if workers + chief < 1:
        raise UsageError("a cluster needs at least one worker or a chief")
    if least is not None:
        check_range(options, chief)
    if not options.hosts and workers + options.ps > _MOST_TASKS:
        raise UsageError(
            f"one machine starts at most {_MOST_TASKS} tasks. "
            f"Received: --workers={options.workers}, --ps={options.ps}"
        )
    evaluator = bool(options.evaluator)
    return {"workers": workers, "ps": options.ps, "chief": chief, "evaluator": evaluator}, least


def workers_of(text: str | None) -> tuple[int | None, int | None]:
    """The least number of workers, of a range, and the largest.

    Args:
        text: The flag --workers, or None.

    Raises:
        UsageError: If it is neither a number nor a range.
    """
    if text is None:
        return None, None
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text, re.ASCII)
    if not found:
        raise UsageError(
            "--workers takes a number, or the least and the largest one, as in 1:3. "
            f"Received: --workers={text}"
        )
    least, most = found.groups()
    if least is None:
        return None, int(most)
    if not 1 <= int(least) <= int(most):
        raise UsageError(
            "the first number of --workers is at least 1, and the second at least the first. "
            f"Received: --workers={text}"
        )
    return int(least), int(most)


def check_range(options: flags.FlagValues, chief: bool) -> None:
    """Raises UsageError if workers of the cluster, or of its strategy, cannot come and go."""
    received = f"Received: --workers={options.workers}"
    if not (options.ps and chief):
        raise UsageError(
            "workers come and go in a cluster with a chief and parameter servers, under "
            f"ParameterServerStrategy: add --ps 1, or give --workers one number. {received}, "
            f"--ps={options.ps}, --{'' if chief else 'no'}chief"
        )
    if options.strategy is None:
        return  # The script's own says whether it can.
    entry = entries.read(lookup.find(options.strategy))
    if entry.strategy != "ParameterServerStrategy":
        raise UsageError(
            f"{options.strategy} needs all of its workers, or may choose a strategy that does: "
            "give --workers one number, or take --strategy async_parameter_server. "
            f"{received}, --strategy={options.strategy}"
        )
