"""Distribution strategies that Keras 3 on TensorFlow lacks, driven by plain `model.fit`."""

import functools
import importlib
import os
import random
import sys
import types
import typing

from keras_psplus.versions import __version__

_EXPORTS = {
    "DeviceMesh": "keras_psplus.tensor_parallel",
    "HybridStrategy": "keras_psplus.hybrid",
    "LayoutMap": "keras_psplus.tensor_parallel",
    "ModelParallelStrategy": "keras_psplus.tensor_parallel",
    "MultiWorkerMirroredStrategy": "keras_psplus.all_reduce",
    "ParameterServerStrategy": "keras_psplus.parameter_server",
    "PeerLostError": "keras_psplus.errors",
    "PipelineStrategy": "keras_psplus.pipeline",
    "SidecarEvaluator": "keras_psplus.sidecar_evaluator",
    "TensorLayout": "keras_psplus.tensor_parallel",
    "single_process": "keras_psplus.core.live",
    "stage": "keras_psplus.pipeline",
    "strategy_from_env": "keras_psplus.catalogue",
    "task_type": "keras_psplus.cluster.discovery.find",
    "unit": "keras_psplus.core.models",
}

# Modules that `import keras_psplus` need not import, but whose contents can be used after it.
_MODULES = ("callbacks", "compression", "errors", "layers", "serving", "tables", "updates")

__all__ = ["__version__", *_EXPORTS, *_MODULES]


_is_loading = _is_loaded = False


def _load() -> None:
    """Checks versions, and has the first strategy install the hooks into Keras."""
    global _is_loading
    if _is_loading or _is_loaded:
        return  # Modules imported below ask for parts of this package.
    from keras_psplus import versions

    versions.check_versions()
    _is_loading = True
    # Libraries that are imported below draw numbers, which a script that has set a seed relies on.
    drawn = random.getstate()
    try:
        _prepare(versions)
    finally:
        _is_loading = False
        random.setstate(drawn)


def _prepare(versions: types.ModuleType) -> None:
    global _is_loaded
    with versions.naming_misfits():
        from keras_psplus.cluster.process import early_init, stock_strategies

        # Before anything else of TensorFlow's runs, so that an early initialisation can be named.
        early_init.install()
        from keras_psplus import activation, keras_hooks
        from keras_psplus.cluster.monitor import task_report
        from keras_psplus.core import plan

        keras_hooks.check()
        # Keras loads files of models with these layers then.
        importlib.import_module("keras_psplus.layers")
    activation.at_activation(functools.partial(early_init.warn, dict(os.environ)))
    activation.at_activation(keras_hooks.install)
    activation.at_activation(stock_strategies.install)
    _is_loaded = True
    if plan.read() is not None or task_report.is_wanted():
        # `keras-psplus` has started this process, also of a script without a strategy.
        activation.activate()


def __getattr__(name: str) -> typing.Any:
    if name not in (*_EXPORTS, *_MODULES):
        raise AttributeError(f"module 'keras_psplus' has no attribute '{name}'")
    _load()
    if name in _MODULES:
        return importlib.import_module(f"keras_psplus.{name}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def _in_launcher() -> bool:
    """Whether this process is the `keras-psplus` command, which must start without TensorFlow."""
    command = os.path.basename(sys.argv[0]) if sys.argv else ""
    return command == "keras-psplus" or _module_of(sys.orig_argv[1:]) == "keras_psplus"


def _module_of(arguments: list[str]) -> str | None:
    """The module that Python was told to run by `-m`, behind options of its own."""
    while arguments[:1] and arguments[0].startswith("-"):
        option, *arguments = arguments
        if option == "-m":
            return arguments[0] if arguments else None
        if option in ("-W", "-X"):
            arguments = arguments[1:]
    return None


if not _in_launcher():
    _load()
