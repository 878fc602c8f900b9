"""The flags that say what `keras_psplus.strategy_from_env()` returns in the script."""

import os
import sys
from collections.abc import Callable

from absl import flags

from keras_psplus.catalogue import automatic, lookup
from keras_psplus.cli.flags import combinations
from keras_psplus.cli.flags.parsing import UsageError
from keras_psplus.cli.planning import auto


def define(values: flags.FlagValues) -> None:
    """Defines --strategy, --plan, --compression and --updates."""
    flags.DEFINE_string(
        "strategy",
        None,
        "What `keras_psplus.strategy_from_env()` returns in the script: an entry of the catalogue "
        "(--list) or a .py file that defines `strategy()`.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "plan",
        None,
        "With --strategy auto: the file to choose by, as `keras-psplus plan --json` prints it "
        f"(default: what {automatic.PLAN_VARIABLE} names; `run` measures the script if there is "
        "none).",
        flag_values=values,
    )
    flags.DEFINE_string(
        "compression",
        None,
        "The `compression` of that strategy: bf16, fp16, int8, sign, topk:0.01, randomk:0.1, "
        "powersgd:4, factors, factors:bf16 or factors:fp16.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "updates",
        None,
        "Its `updates`: accumulate:4, local_sgd:8 or diloco:100.",
        flag_values=values,
    )


def variables(
    options: flags.FlagValues,
    layout: dict[str, int],
    log: Callable[[str], None] | None = None,
    may_measure: bool = False,
) -> dict[str, str]:
    """The environment variables from which `keras_psplus.strategy_from_env()` learns what to make.

    Args:
        layout: Dict with the numbers of `workers` and `ps`, and whether there is a `chief`.
        log: Takes a line that says which entry `auto` stands for; by default it goes to stderr.
        may_measure: Whether `auto` may be left open, for the script to be measured.

    Raises:
        UsageError: If the flags do not go together.
    """
    given = {
        option: text
        for option in lookup.OPTION_VARIABLES
        if (text := getattr(options, option)) is not None
    }
    strategy = options.strategy
    combinations.check_combination(strategy, layout, given)
    found = {lookup.OPTION_VARIABLES[option]: text for option, text in given.items()}
    if auto.is_auto(strategy):
        for variable in lookup.OPTION_VARIABLES.values():
            if os.environ.get(variable):  # Tasks would give it to what is taken.
                raise UsageError(
                    f"{strategy} decides itself what is sent, and when: unset {variable}. "
                    f"Received: --strategy={strategy}, {variable}={os.environ[variable]}"
                )
        chosen = auto.by_plan(options, layout)
        if chosen is None:
            if not may_measure:
                raise UsageError(
                    "nothing is known of the script: write `keras-psplus plan --json SCRIPT > "
                    "plan.json`, and say --plan plan.json. "
                    f"Received: --strategy={strategy}, without --plan"
                )
            return found
        (log or _to_stderr)(str(chosen))
        strategy = chosen.entry
    elif options.plan is not None:
        raise UsageError(f"--plan goes with --strategy auto. Received: --strategy={strategy}")
    if strategy is not None:
        path = lookup.find(strategy)
        name = path.stem if lookup.is_entry(strategy) else str(path)
        found[lookup.STRATEGY_VARIABLE] = name
    return found


def _to_stderr(line: str) -> None:
    print(f"keras-psplus: {line}", file=sys.stderr)
