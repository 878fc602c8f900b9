"""The catalogue of strategies: which names there are, and the one that the environment names."""

import importlib
import importlib.util
import os
import pathlib
import sys

STRATEGY_VARIABLE = "KERAS_PSPLUS_STRATEGY"

_PACKAGE = "keras_psplus.strategies"
_HERE = pathlib.Path(__file__).resolve().parent
# Installed, the catalogue is a part of the package; in a checkout it lies beside it.
_FOLDERS = (_HERE / "strategies", _HERE.parent / "strategies")


def strategy(default=None):
    """Returns the strategy that the launcher's `--strategy` names.

    The name is in the environment variable KERAS_PSPLUS_STRATEGY: an entry of
    the catalogue or the path of a Python file that defines `strategy()`.

    Example:

    ```python
    strategy = keras_psplus.strategy()
    with strategy.scope():
        model = ...
    ```

    Args:
        default: The entry to use if the variable is not set. Without it,
            `"all_reduce"` if TF_CONFIG holds a cluster, else `"single"`.

    Returns:
        What the entry's `strategy()` returns.

    Raises:
        ValueError: If there is no such entry, or it defines no `strategy()`.
    """
    name = os.environ.get(STRATEGY_VARIABLE) or default or _default()
    return load(name).strategy()


def load(name_or_file):
    """Imports an entry of the catalogue, or a file of the same form.

    Args:
        name_or_file: An entry's name, e.g. `"all_reduce"`, or the path of a
            `.py` file that defines `strategy()`.

    Returns:
        The module.

    Raises:
        ValueError: If there is no such entry, or it defines no `strategy()`.
    """
    path = find(name_or_file)
    module = _load_file(path) if _is_path(name_or_file) else _import_entry(path)
    if not callable(getattr(module, "strategy", None)):
        raise ValueError(
            f"{path} defines no function `strategy()` that makes the strategy. "
            f"Received: {str(name_or_file)!r}"
        )
    return module


def find(name_or_file):
    """Returns the path of an entry's file without importing it.

    Args:
        name_or_file: As for `load`.

    Returns:
        A `pathlib.Path`.

    Raises:
        ValueError: If there is no such entry; the message lists those there are.
    """
    if _is_path(name_or_file):
        path = pathlib.Path(name_or_file).expanduser()
        if path.is_file():
            return path.resolve()
        raise ValueError(f"There is no file {str(path)!r}. {_listing(name_or_file)}")
    for folder in _FOLDERS:
        path = folder / f"{name_or_file}.py"
        if path.is_file() and not path.name.startswith("_"):
            return path
    raise ValueError(f"The catalogue has no entry {str(name_or_file)!r}. {_listing(name_or_file)}")


def names():
    """Lists the catalogue's entries."""
    return sorted(
        {
            path.stem
            for folder in _FOLDERS
            for path in folder.glob("*.py")
            if not path.name.startswith("_")
        }
    )


def _default():
    # Not at module level: the launcher imports this module for `find` and `names` alone.
    from keras_psplus.cluster.config import read_task_config

    return "single" if read_task_config() is None else "all_reduce"


def _is_path(name_or_file):
    text = os.fspath(name_or_file)
    return text.endswith(".py") or os.sep in text


def _listing(name_or_file):
    listed = ", ".join(names()) or "(none found)"
    return (
        f"Give one of {listed}, or the path of a .py file that defines `strategy()`. "
        f"Received: {str(name_or_file)!r}"
    )


def _import_entry(path):
    if _PACKAGE not in sys.modules and path.parent == _FOLDERS[1]:
        _import_package_of_checkout(path.parent)
    return importlib.import_module(f"{_PACKAGE}.{path.stem}")


def _import_package_of_checkout(folder):
    """Imports the checkout's `strategies/` under the name that it has when installed."""
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, init if init.is_file() else None, submodule_search_locations=[str(folder)]
    )
    if spec is None:  # no __init__.py
        spec = importlib.util.spec_from_loader(_PACKAGE, loader=None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    _execute(spec)


def _load_file(path):
    # A name of its own in sys.modules: pickling and Keras's registration look modules up there.
    return _execute(
        importlib.util.spec_from_file_location(f"keras_psplus_strategy_{path.stem}", path)
    )


def _execute(spec):
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
