"""What compressors and `updates` keep, beside BackupAndRestore's model: a file for each worker.

Residuals and accumulated gradients differ from worker to worker, and all that workers have in
common (PowerSGD's factors, counters of batches) has to stay in common: either all workers resume
with what they had, or none does.

Every worker writes its file before the chief has the new state count, and no file is removed that
a state needs. A state has the names and the digests of its files.
"""

import contextlib
import json
import re
import time
import weakref

import tensorflow as tf
from keras.src.utils import file_utils

from keras_psplus import digests
from keras_psplus.hybrid import shard_files
from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.keras_hooks.updates import optimizers_of
from keras_psplus.log import logger
from keras_psplus.parameter_server import state_files

# More than all workers together can have accumulated.
MANY = 1 << 20
# For so long, a parameter server job may be about to be ended because a worker is gone.
_UNREACHABLE_SECONDS = 60.0
_unreachable_since = weakref.WeakKeyDictionary()


def save(strategy, model, folder, what, names_in_use, make_folder=None, waits=False):
    """Writes what every worker keeps; when this returns, all workers have written theirs.

    Args:
        strategy: The strategy.
        model: The model.
        folder: The folder of what is saved, on this worker.
        what: Its kind, for messages.
        names_in_use: Function without arguments that is called on the chief and returns the names
            of the files that are needed as long as the new ones do not count, or None if it is
            not known.
        make_folder: Function that makes the folder of workers' files, by its path; by default
            `tf.io.gfile.makedirs`.
        waits: Whether workers wait for each other even if they keep nothing.

    Returns:
        Dict from the names of all workers' files to their digests. None, under parameter servers,
        if a worker cannot be reached: the job may be about to be started again, and would go on
        without what that worker keeps.

    Raises:
        OSError: If a worker cannot write; on all workers.
        PeerLostError: If another worker is gone.
    """
    if asynchronous(strategy) is not None:
        return _save_on_chief(strategy, model, folder, names_in_use)
    is_kept, control = keeps(strategy), strategy.extended.control
    files, problem = {}, ""
    if is_kept:
        try:
            files = _write(strategy, model, folder, make_folder)
        except (OSError, tf.errors.OpError) as error:
            problem = _problem(strategy, folder, error)
    answer = {"problem": problem, "files": files}
    if (is_kept or waits) and strategy.is_chief:
        answer["in_use"] = names_in_use()
    answers = [answer]
    if control is not None and (is_kept or waits):
        answers = [json.loads(text) for text in control.exchange(what, json.dumps(answer))]
    problem = next((one["problem"] for one in answers if one["problem"]), None)
    if problem:
        with contextlib.suppress(OSError, tf.errors.OpError):
            _remove(files, folder)
        raise OSError(problem)
    if is_kept and answers[0]["in_use"] is not None:
        # Also if it cannot be removed, it does no harm.
        with contextlib.suppress(OSError, tf.errors.OpError):
            _remove(set(_files(strategy, folder)).difference(files, answers[0]["in_use"]), folder)
    return {name: digest for one in answers for name, digest in one["files"].items()}


def _digests(names, folder):
    """Digests of files by their names, which the disk has when this returns."""
    found = {}
    for name in names:
        path = file_utils.join(folder_in(folder), name)
        shard_files.sync(path)
        found[name] = digests.of_file(path)
    return found


def _problem(strategy, folder, error):
    task = strategy.task.name if strategy.task else "this process"
    reason = getattr(error, "message", None) or f"{error}"
    return f"{task} cannot write to {folder}: {reason}"


def _write(strategy, model, folder, make_folder):
    """Writes this worker's files; returns their digests by their names."""
    (make_folder or tf.io.gfile.makedirs)(folder_in(folder))
    used, step = set(_files(strategy, folder).values()), number_of_batches(strategy, model)
    while step in used:
        # Of a state that counts, or of one that was never written to its end.
        step += 1
    path = path_of(strategy, folder, step)
    try:
        states(strategy, model).write(path)
        names = [name for name, of_step in _files(strategy, folder).items() if of_step == step]
        return _digests(names, folder)
    except (OSError, tf.errors.OpError):
        with contextlib.suppress(OSError, tf.errors.OpError):
            own = _files(strategy, folder)
            _remove([name for name, of_step in own.items() if of_step == step], folder)
        raise


def _save_on_chief(strategy, model, folder, names_in_use):
    """Writes what the workers of parameter servers keep: the chief has their files."""
    strategy.scheduler.join()
    states, place = strategy.extended.worker_states, folder_in(folder)
    if not states.has_any:
        return {}
    before, step = state_files.steps(place), number_of_batches(strategy, model)
    while step in before.values():
        step += 1
    names = []
    try:
        names, unreachable = state_files.write(states, strategy.num_workers, place, step)
        since = _unreachable_since.setdefault(strategy, time.monotonic())
        if not unreachable:
            del _unreachable_since[strategy]
        elif time.monotonic() - since < _UNREACHABLE_SECONDS:
            _remove(names, folder)
            logger.warning(
                "nothing is saved now, as worker-%d cannot be reached, and what it has left out of "
                "its gradients would be missing; what was saved before stays",
                unreachable[0],
            )
            return None
        for worker in unreachable:
            state_files.warn_unreachable(worker)
        files = _digests(names, folder)
    except (OSError, tf.errors.OpError) as error:
        with contextlib.suppress(OSError, tf.errors.OpError):
            new = [n for n in tf.io.gfile.listdir(place) if f"_step_{step}.npz" in n]
            _remove(new, folder)
        raise OSError(_problem(strategy, folder, error)) from error
    in_use = names_in_use()
    if in_use is not None:
        with contextlib.suppress(OSError, tf.errors.OpError):
            _remove(set(before).difference(in_use), folder)
    return files


def problems(strategy, folder, saved):
    """What is wrong with the workers' files of some states; on all workers.

    Args:
        strategy: The strategy.
        folder: The folder of what is saved, on this worker.
        saved: List of dicts as `save` has returned them, or None for a state of an earlier version.

    Returns:
        List of lists of texts, one list for each state.
    """
    own = [_problems(strategy, folder, files) if files is not None else [] for files in saved]
    control = getattr(strategy.extended, "control", None)
    if control is None or not keeps(strategy):
        return own
    answers = control.exchange("compression state", json.dumps(own))
    return [sum(of_state, []) for of_state in zip(*map(json.loads, answers))]


def _problems(strategy, folder, files):
    """What is wrong with this worker's files of a state."""
    if asynchronous(strategy) is None:
        if not keeps(strategy):
            return []
        files = _own(strategy, files)
        if not files:
            return [f"worker {strategy.extended._id_in_cluster} has no file for this step"]
    place = folder_in(folder)
    found = (digests.problem_of(file_utils.join(place, name), d) for name, d in files.items())
    return [problem for problem in found if problem]


def restore(strategy, model, folder, files, problems):
    """Reads what `save` has written, on all workers or on none.

    Args:
        strategy: The strategy.
        model: The model, as the chief has restored it.
        folder: The folder of what is saved, on this worker.
        files: What `save` has returned.
        problems: What is wrong with them, on any worker.
    """
    if problems:
        warn_lost("; ".join(problems), folder_in(folder))
    elif asynchronous(strategy) is not None:
        steps = state_files.steps(folder_in(folder))
        for step in {steps[name] for name in files}:
            strategy.restore_compression_state(folder_in(folder), step)
    elif keeps(strategy):
        (name, *_) = _own(strategy, files)
        path = file_utils.join(folder_in(folder), name.rpartition(".")[0])
        # States are made by the first step, and get their values then.
        states(strategy, model).read(path).expect_partial()


def warn_lost(why, where):
    """Says that all workers begin with nothing kept."""
    logger.warning(
        "what compressors had left out and what was accumulated before the last backup is "
        "lost: %s. Training goes on with none of it. Received: %s",
        why,
        where,
    )


def delete(strategy, folder):
    """Deletes this worker's files."""
    if asynchronous(strategy) is None:
        with contextlib.suppress(OSError, tf.errors.OpError):
            _remove(_files(strategy, folder), folder)


def keeps(strategy):
    """Whether workers under all-reduce keep anything from step to step."""
    return strategy.extended.reducers.compresses or strategy.updates is not None


def states(strategy, model):
    """What this worker keeps under all-reduce, a `tf.train.Checkpoint`."""
    found = {}
    for name, optimizer in optimizers_of(model).items():
        found[name] = strategy.compression_state(optimizer)
        if strategy.updates is not None:
            found[f"{name}_updates"] = strategy.update_state(optimizer)
    return tf.train.Checkpoint(**found)


def number_of_steps(model):
    """A number that grows with every step of any optimizer."""
    return sum(int(optimizer.iterations.numpy()) for optimizer in optimizers_of(model).values())


def number_of_batches(strategy, model):
    """A number that grows with every batch."""
    if asynchronous(strategy) is not None:
        if strategy.updates is None:
            return sum(int(one._iterations.numpy()) for one in optimizers_of(model).values())
        return number_of_steps(model) * MANY + sum(strategy.updating.held.values())
    of_update = getattr(strategy.updates, "steps", 1)
    number = number_of_steps(model) * of_update
    if of_update > 1:
        batches = strategy.extended.updating.batches
        number += sum(batches(optimizer) for optimizer in optimizers_of(model).values()) % of_update
    return number


def folder_in(folder):
    """The folder of the workers' files in that of what is saved."""
    return file_utils.join(folder, "compression")


def path_of(strategy, folder, step):
    """The path of this worker's files for a step, without ending."""
    return file_utils.join(folder_in(folder), f"{_worker(strategy)}-step-{step}")


def _worker(strategy):
    index, replicas = strategy.extended._id_in_cluster, strategy.num_replicas_in_sync
    return f"worker-{index}-of-{strategy.num_workers}-with-{replicas}-replicas"


def _own(strategy, files):
    """Those of some workers' files that are this worker's."""
    beginning = f"{_worker(strategy)}-step-"
    return {name: digest for name, digest in files.items() if name.startswith(beginning)}


def _files(strategy, folder):
    """This worker's files, also those that were not written to their end, and their steps."""
    if not file_utils.exists(folder_in(folder)):
        return {}
    pattern = re.compile(rf"{_worker(strategy)}-step-(\d+)[._]")
    fitting = [(name, pattern.match(name)) for name in file_utils.listdir(folder_in(folder))]
    return {name: int(match[1]) for name, match in fitting if match}


def _remove(names, folder):
    for name in names:
        path = file_utils.join(folder_in(folder), name)
        if file_utils.isdir(path):
            file_utils.rmtree(path)
        elif file_utils.exists(path):
            file_utils.remove(path)
