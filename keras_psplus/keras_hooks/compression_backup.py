"""What compressors keep, beside BackupAndRestore's model: a file for each worker.

Residuals differ from worker to worker, and all that workers have in common (PowerSGD's factors) has
to stay in common: either all workers resume with what they had, or none does.
"""

import contextlib
import re

import keras
import tensorflow as tf
from keras.src.utils import file_utils

from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.log import logger


def save(strategy, model, folder):
    """Writes this worker's state, for the step that the model is at now."""
    if asynchronous(strategy) is not None:
        strategy.save_compression_state(_folder(folder), _step(model))
        return
    if not strategy.extended.reducers.compresses:
        return
    now = _step(model)
    tf.io.gfile.makedirs(_folder(folder))
    before = _files(strategy, folder)
    _states(strategy, model).write(_path(strategy, now, folder))
    # The last one stays: the chief may not have written its model yet.
    last = max((step for step in before.values() if step < now), default=now)
    _remove([name for name, step in before.items() if step not in (last, now)], folder)


def restore(strategy, model, folder):
    """Reads what `save` wrote at the step that the model is at now, on all workers or on none."""
    if asynchronous(strategy) is not None:
        strategy.restore_compression_state(_folder(folder), _step(model))
        return
    if not strategy.extended.reducers.compresses:
        return
    path = _path(strategy, _step(model), folder)
    found = file_utils.exists(f"{path}.index")
    control = strategy.extended.control
    votes = control.exchange("compression state", str(int(found))) if control else [found]
    if all(int(vote) for vote in votes):
        # States are made by the first step, and get their values then.
        _states(strategy, model).read(path).expect_partial()
    else:
        missing = ", ".join(f"worker {i}" for i, vote in enumerate(votes) if not int(vote))
        logger.warning(
            "what compressors had left out before the last backup is lost: %s has no "
            "file for this step. Training goes on with empty residuals. Received: %s",
            missing,
            path,
        )


def delete(strategy, folder):
    """Deletes this worker's files."""
    with contextlib.suppress(OSError, tf.errors.OpError):
        _remove(_files(strategy, folder), folder)


def optimizers_of(model):
    """All optimizers that are attributes of a model, or in lists or dicts that are, by names."""
    found = {}
    for name, value in vars(model).items():
        if isinstance(value, dict):
            value = list(value.values())
        for i, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(one, keras.optimizers.Optimizer):
                inner = getattr(one, "inner_optimizer", one)
                if all(inner is not other for other in found.values()):
                    found[f"{name}_{i}" if i else name] = inner
    return found


def _states(strategy, model):
    states = {
        name: strategy.compression_state(optimizer)
        for name, optimizer in optimizers_of(model).items()
    }
    return tf.train.Checkpoint(**states)


def _step(model):
    """A number that grows with every step of any optimizer."""
    return sum(int(optimizer.iterations.numpy()) for optimizer in optimizers_of(model).values())


def _folder(folder):
    return file_utils.join(folder, "compression")


def _worker(strategy):
    index, replicas = strategy.extended._id_in_cluster, strategy.num_replicas_in_sync
    return f"worker-{index}-of-{strategy.num_workers}-with-{replicas}-replicas"


def _path(strategy, step, folder):
    return file_utils.join(_folder(folder), f"{_worker(strategy)}-step-{step}")


def _files(strategy, folder):
    """This worker's files and the steps that they are of."""
    if not file_utils.exists(_folder(folder)):
        return {}
    pattern = re.compile(rf"{_worker(strategy)}-step-(\d+)\.")
    fitting = [(name, pattern.match(name)) for name in file_utils.listdir(_folder(folder))]
    return {name: int(match[1]) for name, match in fitting if match}


def _remove(names, folder):
    for name in names:
        file_utils.remove(file_utils.join(_folder(folder), name))
