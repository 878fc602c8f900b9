"""Saving: files appear whole, whoever writes them and however often.

`model.save` is called on all workers by some scripts and on the chief alone by others, on disks
that are shared or not, so it can wait for nobody. Every caller writes a file of its own beside the
target and renames it: all of them hold the same weights, and no reader sees half a file. Nor does
the restart of a job whose parameter server died while its variables were being written.
"""

import contextlib
import os
from concurrent import futures

import tensorflow as tf
from keras.src.models import model as model_module
from keras.src.saving import saving_lib

from keras_psplus.keras_hooks import step_registry
from keras_psplus.keras_hooks.ownership import asynchronous, distributing
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.thread_flag import ThreadFlag

# Raised while models are not written: for callbacks of workers that are not the chief.
suppressed = ThreadFlag()
_skipped = {}


def install():
    """Installs this module's hooks."""
    for name in ("save", "save_weights"):
        replace(model_module.Model, name, ["self", "filepath", "overwrite"])(_save)
    replace(model_module.Model, "export", ["self", "filepath"])(_export)
    replace(saving_lib, "get_attr_skipset", ["obj_type"])(_attributes_to_skip)


def _strategy_of(model):
    return distributing(getattr(model, "_distribute_strategy", None))


def _attributes_to_skip(original, obj_type):
    if not tf.distribute.has_strategy():
        return original(obj_type)
    # Keras makes an optimizer to see what attributes each of them has. In a strategy's scope its
    # variables would be all workers', and a chief that saves by itself would wait for the others.
    if obj_type not in _skipped:
        # A thread of its own is outside of the scope.
        with futures.ThreadPoolExecutor(1) as executor:
            _skipped[obj_type] = executor.submit(original, obj_type).result()
    return _skipped[obj_type]


def _export(original, self, filepath, *args, **kwargs):
    strategy = _strategy_of(self)
    if asynchronous(strategy) is not None:
        step_registry.drain(strategy)
        # A thread of its own is outside of the strategy's scope even if the caller is inside.
        with futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(_export_plain, original, self, filepath, args, kwargs).result()
    # A folder cannot be put in place by one rename.
    if strategy is None or strategy.is_chief:
        return original(self, filepath, *args, **kwargs)
    return None


def _export_plain(original, model, filepath, args, kwargs):
    """Exports a model while its variables are copies on the chief.

    What is exported is traced now; traced with the variables of parameter servers, it would read
    from them, shard by shard.
    """
    of_servers = [(variable, variable._value) for variable in model.variables]
    try:
        for variable, value in of_servers:
            variable._value = tf.Variable(
                value.numpy(), trainable=variable.trainable, name=variable.name
            )
        return original(model, filepath, *args, **kwargs)
    finally:
        for variable, value in of_servers:
            variable._value = value


def _save(original, self, filepath, overwrite=True, *args, **kwargs):
    strategy = _strategy_of(self)
    if strategy is None:
        return original(self, filepath, overwrite, *args, **kwargs)
    if suppressed:
        return None
    step_registry.drain(strategy)
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    sharded = bool(args) or any(kwargs.get(k) is not None for k in ("max_shard_size", "zipped"))
    if sharded or not path.endswith((".keras", ".h5")) or "://" in path:
        # Directories and remote files cannot be put in place by one rename: the chief writes.
        return original(self, filepath, overwrite, *args, **kwargs) if strategy.is_chief else None
    if not overwrite and os.path.exists(path):
        return original(self, filepath, overwrite, *args, **kwargs)
    folder, name = os.path.split(path)
    own = os.path.join(folder, f".{strategy.task.name if strategy.task else 'local'}-{name}")
    try:
        result = original(self, own, True, *args, **kwargs)
        os.replace(own, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(own)
    return result
