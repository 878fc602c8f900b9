"""The flags that say what `keras_psplus.strategy()` returns in the script."""

from absl import flags

from keras_psplus import catalogue
from keras_psplus.cli import combinations


def define(values: flags.FlagValues) -> None:
    """Defines --strategy, --compression and --updates."""
    flags.DEFINE_string(
        "strategy",
        None,
        "What `keras_psplus.strategy()` returns in the script: an entry of the catalogue (--list) "
        "or a .py file that defines `strategy()`.",
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
    """The environment variables from which `keras_psplus.strategy()` learns what to make.

    Args:
        options: The parsed flags.
        layout: Dict with the numbers of `workers` and `ps`, and whether there is a `chief`.

    Raises:
        UsageError: If the flags do not go together.
    """
    given = {
        option: text
        for option in catalogue.OPTION_VARIABLES
        if (text := getattr(options, option)) is not None
    }
    combinations.check_combination(options.strategy, layout, given)
    found = {catalogue.OPTION_VARIABLES[option]: text for option, text in given.items()}
    if options.strategy is not None:
        path = catalogue.find(options.strategy)
        name = path.stem if catalogue.is_entry(options.strategy) else str(path)
        found[catalogue.STRATEGY_VARIABLE] = name
    return found
