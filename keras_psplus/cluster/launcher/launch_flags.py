"""The launcher's `--strategy`, `--compression` and `--updates`, as the environment passes them on.

`keras_psplus.strategy_from_env()` makes what they say. A strategy that the script makes itself
takes those of its arguments that the script does not give, and says which flags have no effect.
"""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from typing import Any

from keras_psplus.cluster.config import ClusterConfigError, read_task_config
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE
from keras_psplus.log import info_once, warn_once

STRATEGY_VARIABLE = "KERAS_PSPLUS_STRATEGY"
# Arguments of the strategy, and the variables that they are taken from.
OPTION_VARIABLES = {"compression": "KERAS_PSPLUS_COMPRESSION", "updates": "KERAS_PSPLUS_UPDATES"}
# The strategy whose workers may come and go.
_ELASTIC = "ParameterServerStrategy"
# What `keras-psplus plan` asks of the script, whatever strategy it makes.
PLAN_REQUEST_VARIABLE = "KERAS_PSPLUS_PLAN"
# What the catalogue's entries are variants of.
PLAIN: dict[str | None, str] = {
    "MultiWorkerMirroredStrategy": "all_reduce",
    "ParameterServerStrategy": "async_parameter_server",
    "HybridStrategy": "hybrid",
}

_settled = contextvars.ContextVar("settled", default=False)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Context of a constructor whose caller has read the flags."""
    token = _settled.set(True)
    try:
        yield
    finally:
        _settled.reset(token)


def fill(name: str, **given: Any) -> tuple[Any, ...]:
    """Returns a constructor's arguments, and from the environment those that are None.

    Args:
        name: Name of the strategy's class.
        **given: The arguments of `OPTION_VARIABLES` that it has, as the script gives them.

    Example:

    ```python
    # keras-psplus run --compression int8 train.py
    fill("MultiWorkerMirroredStrategy", compression=None, updates="accumulate:2")
    # ("int8", "accumulate:2")
    ```

    Raises:
        ClusterConfigError: If workers are to come and go, and the strategy needs all of them.
    """
    if name != _ELASTIC:
        _refuse_range(name)
    if _settled.get() or os.environ.get(PLAN_REQUEST_VARIABLE):
        return tuple(given.values())
    filled = dict(given)
    for option, variable in OPTION_VARIABLES.items():
        text = os.environ.get(variable)
        if not text:
            continue
        flag = f"--{option} {text} ({variable})"
        if option in given and given[option] is None:
            filled[option] = text
            _say(info_once, f"{name} takes {option}={text!r} from {flag}")
        elif given.get(option) != text:
            why = f"gives `{option}` itself" if option in given else f"has no `{option}` here"
            _say(warn_once, f"{flag} has no effect: {name} {why}", f"{variable}={text}")
    entry = os.environ.get(STRATEGY_VARIABLE)
    if entry and entry != PLAIN.get(name):
        _say(
            warn_once,
            f"--strategy {entry} ({STRATEGY_VARIABLE}) has no effect: the script makes {name}(...) "
            "itself. Make the strategy by keras_psplus.strategy_from_env(), which reads the flag",
            f"{STRATEGY_VARIABLE}={entry}",
        )
    return tuple(filled.values())


def min_workers() -> int | None:
    """Number of workers with which the launcher says that training begins, or None.

    Raises:
        ClusterConfigError: If the variable is not a number.
    """
    text = os.environ.get(MIN_WORKERS_VARIABLE, "")
    if text and not text.isdecimal():
        raise ClusterConfigError(
            f"{MIN_WORKERS_VARIABLE} must be the number of workers with which training begins. "
            f"Received: {MIN_WORKERS_VARIABLE}={text!r}"
        )
    return int(text) if text else None


def _refuse_range(name: str) -> None:
    if (least := min_workers()) is not None:
        raise ClusterConfigError(
            f"Workers come and go under {_ELASTIC} alone; {name} needs all of them at every step: "
            "give --workers one number. "
            f"Received: {MIN_WORKERS_VARIABLE}={least}"
        )


def _say(log: Callable[..., None], line: str, received: str | None = None) -> None:
    """Logs a line once, where the job has its log."""
    task = read_task_config()
    if task is None or task.is_chief:
        log("%s", line if received is None else f"{line}. Received: {received}")
