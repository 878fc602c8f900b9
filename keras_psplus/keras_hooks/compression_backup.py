"""What compressors and `updates` keep, beside BackupAndRestore's model: a file for each worker.

Residuals and accumulated gradients differ from worker to worker, and all that workers have in
common (PowerSGD's factors, counters of batches) has to stay in common: either all workers resume
with what they had, or none does.
"""

import contextlib
import json
import re

import tensorflow as tf
from keras.src.utils import file_utils

from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.keras_hooks.updates import optimizers_of
from keras_psplus.log import logger

# More than all workers together can have accumulated.
_MANY = 1 << 20


def save(strategy, model, folder):
    """Writes this worker's state, for the step that the model is at now."""
    if asynchronous(strategy) is not None:
        strategy.scheduler.join()
        strategy.save_compression_state(_folder(folder), _number_of_batches(strategy, model))
        return
    if not _keeps(strategy):
        return
    now = _number(strategy, model)
    tf.io.gfile.makedirs(_folder(folder))
    before = _files(strategy, folder)
    _states(strategy, model).write(_path(strategy, now, folder))
    # The last one stays: the chief may not have written its model yet.
    last = max((step for step in before.values() if step < now), default=now)
    _remove([name for name, step in before.items() if step not in (last, now)], folder)


def note(strategy, model, folder):
    """Writes which step the model is of, on the chief, after the model."""
    number = position(strategy, model)
    if number is not None:
        with file_utils.File(_note_path(folder), "w") as f:
            f.write(json.dumps(number))


def position(strategy, model):
    """Which step the model is of, for `restore`; None if its variables tell."""
    if strategy.updates is None:
        return None
    is_alone = asynchronous(strategy) is not None
    return (_number_of_batches if is_alone else _number)(strategy, model)


def noted(strategy, folder):
    """What `note` wrote, or None."""
    if strategy.updates is None or not file_utils.exists(_note_path(folder)):
        return None
    with file_utils.File(_note_path(folder), "r") as f:
        return json.loads(f.read())


def restore(strategy, model, folder, noted_step=None):
    """Reads what `save` wrote at the step that the model is at now, on all workers or on none.

    Args:
        strategy: The strategy.
        model: The model, as the chief has restored it.
        folder: BackupAndRestore's folder on this worker.
        noted_step: What the chief had `noted`.
    """
    if asynchronous(strategy) is not None:
        number = _number_of_batches(strategy, model)
        if noted_step is not None and noted_step // _MANY == number // _MANY:
            number = noted_step
        strategy.restore_compression_state(_folder(folder), number)
        return
    if not _keeps(strategy):
        return
    path = _path(strategy, _number(strategy, model, noted_step), folder)
    found = file_utils.exists(f"{path}.index")
    control = strategy.extended.control
    votes = control.exchange("compression state", str(int(found))) if control else [found]
    if all(int(vote) for vote in votes):
        # States are made by the first step, and get their values then.
        _states(strategy, model).read(path).expect_partial()
    else:
        missing = ", ".join(f"worker {i}" for i, vote in enumerate(votes) if not int(vote))
        logger.warning(
            "what compressors had left out and what was accumulated before the last backup is "
            "lost: %s has no file for this step. Training goes on with none of it. Received: %s",
            missing,
            path,
        )


def delete(strategy, folder):
    """Deletes this worker's files."""
    with contextlib.suppress(OSError, tf.errors.OpError):
        _remove(_files(strategy, folder), folder)


def _states(strategy, model):
    states = {}
    for name, optimizer in optimizers_of(model).items():
        states[name] = strategy.compression_state(optimizer)
        if strategy.updates is not None:
            states[f"{name}_updates"] = strategy.update_state(optimizer)
    return tf.train.Checkpoint(**states)


def _keeps(strategy):
    return strategy.extended.reducers.compresses or strategy.updates is not None


def _number(strategy, model, noted_step=None):
    """A number that grows with every batch, of what there is or of what was noted."""
    of_update = getattr(strategy.updates, "steps", 1)
    number = _step(model) * of_update
    if noted_step is not None:
        # If the chief died before it had noted the model's step, that is of another model.
        return noted_step if noted_step // of_update == _step(model) else number
    if of_update > 1:
        batches = strategy.extended.updating.batches
        number += sum(batches(optimizer) for optimizer in optimizers_of(model).values()) % of_update
    return number


def _step(model):
    """A number that grows with every step of any optimizer."""
    return sum(int(optimizer.iterations.numpy()) for optimizer in optimizers_of(model).values())


def _number_of_batches(strategy, model):
    """A number that grows with every batch of workers that update each by themselves."""
    if strategy.updates is None:
        return sum(int(one._iterations.numpy()) for one in optimizers_of(model).values())
    return _step(model) * _MANY + sum(strategy.updating.held.values())


def _folder(folder):
    return file_utils.join(folder, "compression")


def _note_path(folder):
    return file_utils.join(folder, "step.json")


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
