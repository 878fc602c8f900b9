"""The flags that say what `keras_psplus.strategy_from_env()` returns in the script."""

from absl import flags

from keras_psplus.catalogue import lookup
from keras_psplus.cli.flags import combinations


def define(values: flags.FlagValues) -> None:
    """Defines --strategy, --compression and --updates."""
    flags.DEFINE_string(
        "strategy",
        None,
        "What `keras_psplus.strategy_from_env()` returns in the script: an entry of the catalogue "
        "(--list) or a .py file that defines `strategy()`.",
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


def variables(options: flags.FlagValues, layout: dict[str, int]) -> dict[str, str]:
    """The environment variables from which `keras_psplus.strategy_from_env()` learns what to make.

    Args:
        layout: Dict with the numbers of `workers` and `ps`, and whether there is a `chief`.

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
    if strategy is not None:
        path = lookup.find(strategy)
        name = path.stem if lookup.is_entry(strategy) else str(path)
        found[lookup.STRATEGY_VARIABLE] = name
    return found
