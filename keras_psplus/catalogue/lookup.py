"""The catalogue of strategies: which names there are, and the one that the environment names."""

import difflib
import importlib
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from typing import Any

from keras_psplus.catalogue import entries
from keras_psplus.cluster.launcher import launch_flags
from keras_psplus.cluster.launcher.launch_flags import OPTION_VARIABLES as OPTION_VARIABLES
from keras_psplus.cluster.launcher.launch_flags import PLAIN
from keras_psplus.cluster.launcher.launch_flags import STRATEGY_VARIABLE as STRATEGY_VARIABLE

_PACKAGE = "keras_psplus.strategies"
_HERE = pathlib.Path(__file__).resolve().parents[1]
# Installed, the catalogue is a part of the package; in a checkout it lies beside it.
_FOLDERS = (_HERE / "strategies", _HERE.parent / "strategies")


def strategy_from_env(default: str | None = None) -> Any:
    """Returns the strategy that the launcher's `--strategy` names.

    The name is in the environment variable KERAS_PSPLUS_STRATEGY: an entry of
    the catalogue or the path of a Python file that defines `strategy()`. What
    the launcher's `--compression` and `--updates` say (KERAS_PSPLUS_COMPRESSION
    and KERAS_PSPLUS_UPDATES) is given to that function as arguments.

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
        What the entry's `strategy()` returns; in an evaluator, which is not in the cluster,
        TensorFlow's default strategy.

    Raises:
        ValueError: If there is no such entry, it defines no `strategy()`, or it
            does not take what the environment asks for.
    """
    # Not at module level: the launcher imports this module for `find` and `names` alone.
    from keras_psplus import activation
    from keras_psplus.cluster.discovery.find import is_evaluator

    activation.activate()
    if is_evaluator():
        return load("single").strategy()
    name = os.environ.get(STRATEGY_VARIABLE) or default or _default()
    options = {
        option: os.environ[variable]
        for option, variable in OPTION_VARIABLES.items()
        if os.environ.get(variable)
    }
    if options:
        problem = problem_with(entries.read(find(name)), options)
        if problem is not None:
            received = ", ".join(f"{OPTION_VARIABLES[o]}={text}" for o, text in options.items())
            raise ValueError(f"{name} {problem}. Received: {received}")
    with launch_flags.settled():
        return load(name).strategy(**options)


def problem_with(entry: entries.Entry, options: Mapping[str, str]) -> str | None:
    """Finds out why an entry does not take options.

    Args:
        options: Dict with some of the keys of `OPTION_VARIABLES`.

    Returns:
        What goes after the entry's name in a sentence, or None if it takes them.
    """
    for option in options:
        if entry.strategy == "PipelineStrategy":
            if option != "compression":
                return f"has no `{option}`: leave out --{option}"
            if "pipelines" not in entry.options:
                return f"has one pipeline, which sends no gradients: leave out --{option}"
            if option in entry.options:
                return f"sets `{option}` itself: leave out --{option}"
            if options[option] not in ("bf16", "fp16"):
                return "sends gradients between pipelines as bf16 or fp16: take --compression bf16"
        if entry.strategy == "ModelParallelStrategy" and option == "compression":
            return f"has one model, whose workers send no gradients: leave out --{option}"
        if "shard" in entry.options:
            return f"has state in shares, without `{option}`: leave out --{option}"
        if option in entry.options:
            return (
                f"sets `{option}` itself: take --strategy {PLAIN[entry.strategy]}, which does not"
            )
        if entry.strategy == "get_strategy":
            return f"has no `{option}`: take --strategy all_reduce"
        if entry.accepts is not None and option not in entry.accepts:
            return (
                f"takes no `{option}`: write `def strategy(**options)` there, and give the "
                "strategy `**options`"
            )
    return None


def load(name_or_file: str | os.PathLike[str]) -> types.ModuleType:
    """Imports an entry of the catalogue, or a file of the same form.

    Args:
        name_or_file: An entry's name, e.g. `"all_reduce"`, or the path of a
            `.py` file that defines `strategy()`.

    Raises:
        ValueError: If there is no such entry, or it defines no `strategy()`.
    """
    path = find(name_or_file)
    module = _import_entry(path) if is_entry(name_or_file) else _load_file(path)
    if not callable(getattr(module, "strategy", None)):
        raise ValueError(
            f"{path} defines no function `strategy()` that makes the strategy. "
            f"Received: {str(name_or_file)!r}"
        )
    return module


def find(name_or_file: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of an entry's file without importing it.

    Args:
        name_or_file: As for `load`.

    Raises:
        ValueError: If there is no such entry; the message lists those there are.
    """
    if not is_entry(name_or_file):
        path = pathlib.Path(name_or_file).expanduser()
        if path.is_file():
            return path.resolve()
        raise ValueError(f"There is no file {str(path)!r}. {_listing(name_or_file)}")
    for folder in _FOLDERS:
        path = folder / f"{name_or_file}.py"
        if path.is_file() and not path.name.startswith("_"):
            return path
    raise ValueError(f"The catalogue has no entry {str(name_or_file)!r}. {_listing(name_or_file)}")


def names() -> list[str]:
    return sorted(
        {
            path.stem
            for folder in _FOLDERS
            for path in folder.glob("*.py")
            if not path.name.startswith("_")
        }
    )


def is_entry(name_or_file: str | os.PathLike[str]) -> bool:
    """Whether a text is meant as an entry's name, not as a file's path."""
    text = os.fspath(name_or_file)
    return not (text.endswith(".py") or os.sep in text)


def _default() -> str:
    # Not at module level: the launcher imports this module for `find` and `names` alone.
    from keras_psplus.cluster.discovery.find import find_task_config

    return "single" if find_task_config() is None else "all_reduce"


def _listing(name_or_file: str | os.PathLike[str]) -> str:
    near = difflib.get_close_matches(os.fspath(name_or_file), names(), 1)
    if near:
        return (
            f"Did you mean {near[0]!r}? `keras-psplus run --list` shows all. "
            f"Received: {str(name_or_file)!r}"
        )
    listed = ", ".join(names()) or "(none found)"
    return (
        f"Give one of {listed}, or the path of a .py file that defines `strategy()`. "
        f"Received: {str(name_or_file)!r}"
    )


def _import_entry(path: pathlib.Path) -> types.ModuleType:
    if _PACKAGE not in sys.modules and path.parent == _FOLDERS[1]:
        _import_package_of_checkout(path.parent)
    return importlib.import_module(f"{_PACKAGE}.{path.stem}")


def _import_package_of_checkout(folder: pathlib.Path) -> None:
    """Imports the checkout's `strategies/` under the name that it has when installed."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, init if init.is_file() else None, submodule_search_locations=[str(folder)]
    )
    if spec is None:  # no __init__.py
        spec = importlib.util.spec_from_loader(_PACKAGE, loader=None, is_package=True)
        assert spec is not None
        spec.submodule_search_locations = [str(folder)]
    _execute(spec)


def _load_file(path: pathlib.Path) -> types.ModuleType:
    # A name of its own in sys.modules: pickling and Keras's registration look modules up there.
    spec = importlib.util.spec_from_file_location(f"keras_psplus_strategy_{path.stem}", path)
    assert spec is not None
    return _execute(spec)


def _execute(spec: ModuleSpec) -> types.ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
