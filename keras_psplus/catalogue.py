"""Strategies by name, and those flags of the launcher that choose one; without TensorFlow.

`keras_psplus.strategy_from_env()` makes what `--strategy`, `--compression` and `--updates` say, as
the environment passes them on. A strategy that the script makes itself takes those of its arguments
that the script does not give, and says which flags have no effect.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib.util
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras_psplus
from keras_psplus import specs
from keras_psplus.cluster.config import ClusterConfigError, read_task_config
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE, min_workers
from keras_psplus.log import info_once, warn_once

STRATEGY_VARIABLE = "KERAS_PSPLUS_STRATEGY"
# Arguments of the strategy, and the variables that they are taken from.
OPTION_VARIABLES = {"compression": "KERAS_PSPLUS_COMPRESSION", "updates": "KERAS_PSPLUS_UPDATES"}
# The request of `keras-psplus plan` to the script, whatever strategy that makes.
PLAN_REQUEST_VARIABLE = "KERAS_PSPLUS_PLAN"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A named strategy."""

    title: str
    strategy: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, **options: Any) -> Any:
        """Makes the strategy, with further arguments."""
        if self.strategy is None:
            import tensorflow as tf

            return tf.distribute.get_strategy()
        return getattr(keras_psplus, self.strategy)(**self.arguments, **options)

    def problem_with(self, options: Iterable[str]) -> str | None:
        """Finds out why the entry does not take options.

        Returns:
            What goes after the entry's name in a sentence, or None if it takes them.
        """
        for option in options:
            if self.strategy == _PIPELINE:
                if option != "compression":
                    return f"has no `{option}`: leave out --{option}"
                return f"has one pipeline, which sends no gradients: leave out --{option}"
            if self.strategy == _TENSORS and option == "compression":
                return f"has one model, whose workers send no gradients: leave out --{option}"
            if "shard" in self.arguments:
                return f"has state in shares, without `{option}`: leave out --{option}"
            if option in self.arguments:
                plain = _PLAIN[self.strategy]
                return f"sets `{option}` itself: take --strategy {plain}, which does not"
            if self.strategy is None:
                return f"has no `{option}`: take --strategy all_reduce"
        return None


def _arguments(texts: Iterable[str]) -> dict[str, str | int]:
    pairs = (text.split("=") for text in texts)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


_SERVERS = "ParameterServerStrategy"  # whose workers may come and go
_PIPELINE = "PipelineStrategy"
_TENSORS = "ModelParallelStrategy"

# Name, class in this library (- for TensorFlow's default strategy) and its arguments; what
# `keras-psplus run --list` says.
_TABLE = """
accumulated_all_reduce MultiWorkerMirroredStrategy updates=accumulate:4
    Synchronous data parallelism, gradients of four batches sent and applied as one.
accumulated_parameter_server ParameterServerStrategy updates=accumulate:4
    Asynchronous parameter servers, gradients of four batches sent and applied as one.
all_reduce MultiWorkerMirroredStrategy
    Synchronous data parallelism: float32 gradients, one all-reduce for every step.
all_reduce_bf16 MultiWorkerMirroredStrategy compression=bf16
    Synchronous data parallelism, gradients sent in bfloat16: half the bytes.
all_reduce_factors MultiWorkerMirroredStrategy compression=factors
    Synchronous data parallelism, gradients sent as the factors that they are products of.
all_reduce_factors_bf16 MultiWorkerMirroredStrategy compression=factors:bf16
    Synchronous data parallelism, gradients sent as their factors in bfloat16.
all_reduce_int8 MultiWorkerMirroredStrategy compression=int8
    Synchronous data parallelism, gradients sent as bytes: a quarter of float32.
all_reduce_powersgd MultiWorkerMirroredStrategy compression=powersgd:4
    Synchronous data parallelism, gradients sent as matrices of rank 4 (PowerSGD).
all_reduce_topk MultiWorkerMirroredStrategy compression=topk:0.01
    Synchronous data parallelism, the largest hundredth of each gradient (top-k).
async_parameter_server ParameterServerStrategy
    Asynchronous parameter servers: every worker's step reads and updates without waiting.
async_parameter_server_int8 ParameterServerStrategy compression=int8 pull_compression=bf16
    Asynchronous parameter servers: gradients as bytes, variables read in bfloat16.
diloco MultiWorkerMirroredStrategy updates=diloco:32 compression=int8
    Workers step alone; every 32 steps an outer optimizer steps along their mean way (DiLoCo).
fsdp MultiWorkerMirroredStrategy shard=all
    Synchronous data parallelism; each worker keeps a share of weights and state (FSDP, ZeRO-3).
hybrid HybridStrategy
    Large embeddings on parameter servers, by rows; everything else all-reduced.
local_sgd MultiWorkerMirroredStrategy updates=local_sgd:8
    Workers step alone, and their weights are averaged every eight steps (local SGD).
local_sgd_parameter_server ParameterServerStrategy updates=local_sgd:8
    Asynchronous parameter servers whose workers take eight steps alone between two messages.
pipedream PipelineStrategy microbatches=4 schedule=pipedream
    The model in stages, with two batches under way: gradients are one update old (PipeDream-2BW).
pipeline PipelineStrategy microbatches=4
    The model in stages, one on each worker, with four micro-batches to a batch (1F1B).
pipeline_gpipe PipelineStrategy microbatches=4 schedule=gpipe
    The model in stages, one on each worker, with four micro-batches to a batch (GPipe).
single -
    One process on one device, as plain Keras trains.
stale_sync_parameter_server ParameterServerStrategy max_staleness=3
    Stale-synchronous parameter servers: no worker is more than three steps ahead of another.
sync_parameter_server ParameterServerStrategy mode=sync
    Synchronous parameter servers: all workers take each step together, as one process would.
tensor_parallel ModelParallelStrategy layout_map=auto
    Tensor parallelism: all workers compute each layer together, each with a part of its weights.
zero MultiWorkerMirroredStrategy shard=optimizer
    Synchronous data parallelism; each worker keeps a share of the optimizer's state (ZeRO).
"""
ENTRIES = {
    name: Entry(title, strategy.removeprefix("-") or None, _arguments(rest.split()))
    for name, strategy, rest, title in re.findall(r"^(\w+) (\S+)(.*)\n +(.*)$", _TABLE, re.M)
}
# The entries that the others of their classes are variants of.
_PLAIN = {entry.strategy: name for name, entry in ENTRIES.items() if not entry.arguments}


def strategy_from_env(default: str | None = None) -> Any:
    """Returns the strategy that the launcher's `--strategy` names.

    The name is in the environment variable KERAS_PSPLUS_STRATEGY: an entry of
    the catalogue or the path of a Python file that defines `strategy()`. What
    the launcher's `--compression` and `--updates` say (KERAS_PSPLUS_COMPRESSION
    and KERAS_PSPLUS_UPDATES) is given to the strategy, or to that function, as arguments.

    Example:

    ```python
    strategy = keras_psplus.strategy_from_env()
    with strategy.scope():
        model = ...
    ```

    Args:
        default: The entry to use if the variable is not set. Without it,
            `"all_reduce"` if TF_CONFIG holds a cluster, else `"single"`.

    Returns:
        The entry's strategy, or what `strategy()` returns; in an evaluator, which is not in the
        cluster, TensorFlow's default strategy.

    Raises:
        ValueError: If there is no such entry, the file defines no `strategy()`, or it
            does not take what the environment asks for.
    """
    # Not at module level: the launcher has no use for them.
    from keras_psplus import activation
    from keras_psplus.cluster.discovery.find import find_task_config, is_evaluator

    activation.activate()
    if is_evaluator():
        return ENTRIES["single"].make()
    name = os.environ.get(STRATEGY_VARIABLE) or default
    if not name:
        name = "single" if find_task_config() is None else "all_reduce"
    options = {
        option: os.environ[variable]
        for option, variable in OPTION_VARIABLES.items()
        if os.environ.get(variable)
    }
    entry = find(name)
    make = _function_of(name) if entry is None else entry.make
    problem = _problem_with(make, options) if entry is None else entry.problem_with(options)
    if problem is not None:
        received = ", ".join(f"{OPTION_VARIABLES[o]}={text}" for o, text in options.items())
        raise ValueError(f"{name} {problem}. Received: {received}")
    with settled():
        return make(**options)


def find(strategy: str) -> Entry | None:
    """Returns an entry, or None for a file of the user's own.

    Args:
        strategy: An entry's name, e.g. `"all_reduce"`, or the path of a `.py` file that defines
            `strategy()`.
    """
    if strategy.endswith(".py") or os.sep in strategy:
        path = pathlib.Path(strategy).expanduser()
        if not path.is_file():
            raise ValueError(f"There is no file {str(path)!r}. {_listing(strategy)}")
        return None
    if strategy not in ENTRIES:
        raise ValueError(f"The catalogue has no entry {strategy!r}. {_listing(strategy)}")
    return ENTRIES[strategy]


def _listing(strategy: str) -> str:
    if near := specs.nearest(strategy, ENTRIES):
        return f"Did you mean {near!r}? `keras-psplus run --list` shows all. Received: {strategy!r}"
    return (
        f"Give one of {', '.join(ENTRIES)}, or the path of a .py file that defines `strategy()`. "
        f"Received: {strategy!r}"
    )


def _function_of(strategy: str) -> Callable[..., Any]:
    """The function `strategy()` of a file of the user's own, which is imported."""
    path = pathlib.Path(strategy).expanduser().resolve()
    # A name of its own in sys.modules: pickling and Keras's registration look modules up there.
    spec = importlib.util.spec_from_file_location(f"keras_psplus_strategy_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    function: Callable[..., Any] | None = getattr(module, "strategy", None)
    if not callable(function):
        raise ValueError(
            f"{path} defines no function `strategy()` that makes the strategy. "
            f"Received: {strategy!r}"
        )
    return function


def _problem_with(function: Callable[..., Any], options: Iterable[str]) -> str | None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    for option in options:
        if option not in {parameter.name for parameter in parameters}:
            return (
                f"takes no `{option}`: write `def strategy(**options)` there, and give the "
                "strategy `**options`"
            )
    return None


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
    """
    if name != _SERVERS:
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
    if entry and entry != _PLAIN.get(name):
        _say(
            warn_once,
            f"--strategy {entry} ({STRATEGY_VARIABLE}) has no effect: the script makes {name}(...) "
            "itself. Make the strategy by keras_psplus.strategy_from_env(), which reads the flag",
            f"{STRATEGY_VARIABLE}={entry}",
        )
    return tuple(filled.values())


def _refuse_range(name: str) -> None:
    if (least := min_workers()) is not None:
        raise ClusterConfigError(
            f"Workers come and go under {_SERVERS} alone; {name} needs all of them at every step: "
            "give --workers one number. "
            f"Received: {MIN_WORKERS_VARIABLE}={least}"
        )


def _say(log: Callable[..., None], line: str, received: str | None = None) -> None:
    task = read_task_config()
    if task is None or task.is_chief:
        log("%s", line if received is None else f"{line}. Received: {received}")
