"""Saving: files and folders appear whole, whoever writes them and however often.

`model.save`, `save_weights` and `export` are called on all workers by some scripts and on the chief
alone by others, on disks that are shared or not, so they can wait for nobody. Every caller writes
to a temporary folder of its own beside the target and renames: all of them hold the same weights,
and no reader sees half a file. Nor does the restart of a job whose parameter server died while its
variables were being written. The target is there when the call returns, on every worker.
"""

import contextlib
import os
import threading
from concurrent import futures

import tensorflow as tf
from keras.src.models import model as model_module
from keras.src.saving import saving_lib
from keras.src.utils import file_utils, io_utils

from keras_psplus import whole_files
from keras_psplus.keras_hooks import step_registry
from keras_psplus.keras_hooks.ownership import asynchronous, distributing
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.thread_flag import ThreadFlag

# Raised while models are not written: for callbacks of workers that are not the chief.
suppressed = ThreadFlag()
_skipped = {}
_local = threading.local()


def install():
    """Installs this module's hooks."""
    for name in ("save", "save_weights"):
        replace(model_module.Model, name, ["self", "filepath", "overwrite"])(_save)
    replace(model_module.Model, "export", ["self", "filepath"])(_export)
    replace(saving_lib, "get_attr_skipset", ["obj_type"])(_attributes_to_skip)
    replace(io_utils, "print_msg", ["message"])(_print)


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
    if strategy is None:
        return original(self, filepath, *args, **kwargs)
    if asynchronous(strategy) is None:
        with _written(strategy, filepath, makes_folders=True) as path:
            return original(self, path, *args, **kwargs)
    step_registry.drain(strategy)

    def export():
        with _written(strategy, filepath, makes_folders=True) as path:
            return _export_plain(original, self, path, args, kwargs)

    # A thread of its own is outside of the strategy's scope even if the caller is inside.
    with futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(export).result()


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
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    if path is None:
        # A file object of the caller's own.
        return original(self, filepath, overwrite, *args, **kwargs)
    if path.startswith("hf://"):
        # A commit for each worker would be as many commits of the same.
        return original(self, filepath, overwrite, *args, **kwargs) if strategy.is_chief else None
    if not overwrite and os.path.exists(path):
        return original(self, filepath, overwrite, *args, **kwargs)
    # For `save`, this is `zipped`; a folder's parents are made by Keras, a file's are not.
    makes_folders = kwargs.get("zipped", args[0] if args else None) is False
    with _written(strategy, path, makes_folders) as own:
        return original(self, own, True, *args, **kwargs)


@contextlib.contextmanager
def _written(strategy, filepath, makes_folders):
    """Context that gives the path to write to, in the place of the one that a script has given."""
    path = os.fspath(filepath)
    folder = os.path.dirname(os.path.realpath(path))
    if file_utils.is_remote_path(path):
        writing = whole_files.uploaded(path)
    elif makes_folders or os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        writing = whole_files.written(path, strategy.task.name if strategy.task else None)
    else:
        # Keras says what is wrong with it.
        writing = contextlib.nullcontext(path)
    with writing as own:
        _local.shown = str(own), path
        try:
            yield own
        except Exception as error:
            error.args = tuple(_as_given(one) for one in error.args)
            if getattr(error, "filename", None):
                error.filename = _as_given(error.filename)
            raise
        finally:
            _local.shown = None


def _print(original, message, *args, **kwargs):
    return original(_as_given(message), *args, **kwargs)


def _as_given(text):
    """What Keras says, with the path that the script has given."""
    shown = getattr(_local, "shown", None)
    return text.replace(*shown) if shown and isinstance(text, str) else text
