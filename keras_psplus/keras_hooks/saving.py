"""Saving: files appear whole, whoever writes them and however often.

`model.save` is called on all workers by some scripts and on the chief alone by others, on disks
that are shared or not, so it can wait for nobody. Every caller writes a file of its own beside the
target and renames it: all of them hold the same weights, and no reader sees half a file.
"""

import contextlib
import os
import threading

from keras.src.models import model as model_module

from keras_psplus.keras_hooks.ownership import ours
from keras_psplus.keras_hooks.patching import replace

_local = threading.local()


@contextlib.contextmanager
def suppressed():
    """Context in which models are not written, for callbacks of workers that are not the chief."""
    outer = getattr(_local, "suppressed", False)
    _local.suppressed = True
    try:
        yield
    finally:
        _local.suppressed = outer


def install():
    """Installs this module's hooks."""
    for name in ("save", "save_weights"):
        replace(model_module.Model, name, ["self", "filepath", "overwrite"])(_save)
    replace(model_module.Model, "export", ["self", "filepath"])(_export)


def _export(original, self, filepath, *args, **kwargs):
    strategy = ours(getattr(self, "_distribute_strategy", None))
    # A folder cannot be put in place by one rename.
    if strategy is None or strategy.is_chief:
        return original(self, filepath, *args, **kwargs)
    return None


def _save(original, self, filepath, overwrite=True, *args, **kwargs):
    strategy = ours(getattr(self, "_distribute_strategy", None))
    if strategy is None:
        return original(self, filepath, overwrite, *args, **kwargs)
    if getattr(_local, "suppressed", False):
        return None
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
