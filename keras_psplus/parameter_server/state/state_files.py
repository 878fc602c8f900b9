"""Files of the workers' compressor states, one for each worker and step."""

from __future__ import annotations

import io
import json
import os
import re
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from keras_psplus.files.reading import open_file
from keras_psplus.log import logger

if TYPE_CHECKING:
    from keras_psplus.parameter_server.state.worker_state import WorkerStates

_FILE = re.compile(r"^compression_worker_(\d+)_step_(\d+)\.npz$")


def save(states: WorkerStates, num_workers: int, folder: str | os.PathLike[str], step: int) -> None:
    """Writes the states of all workers that can be reached.

    Files of earlier steps are removed, but for the last: the model that goes with these may never
    come to be written.

    Args:
        states: `WorkerStates`.
        num_workers: Number of workers.
        folder: Where to write; made if it does not exist.
        step: Number of the step.
    """
    if not states.has_any:
        return
    before = [(name, of_step) for name, _, of_step in _files(folder) if of_step != step]
    last = max((of_step for _, of_step in before if of_step < step), default=None)
    _, unreachable = write(states, num_workers, folder, step)
    for worker in unreachable:
        warn_unreachable(worker)
    for name, of_step in before:
        if of_step != last:
            tf.io.gfile.remove(os.path.join(folder, name))


def write(
    states: WorkerStates, num_workers: int, folder: str | os.PathLike[str], step: int
) -> tuple[list[str], list[int]]:
    """Writes the states of all workers that can be reached, and removes nothing.

    Args:
        states: `WorkerStates`.
        num_workers: Number of workers.
        folder: Where to write; made if it does not exist.
        step: Number of the step.

    Returns:
        List of the names of the files, and list of the workers that could not be reached.
    """
    tf.io.gfile.makedirs(folder)
    names, unreachable = [], []
    for worker in range(num_workers):
        fetched = states.fetch(worker)
        if fetched is None:
            unreachable.append(worker)
        elif fetched:
            names.append(f"compression_worker_{worker}_step_{step}.npz")
            _write(os.path.join(folder, names[-1]), fetched)
    return names, unreachable


def warn_unreachable(worker: int) -> None:
    """Says that a worker's state is not saved."""
    logger.warning(
        "worker-%d cannot be reached: what it has left out of its gradients is not saved", worker
    )


def steps(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Dict from the names of a folder's files to their steps."""
    return {name: step for name, _, step in _files(folder)}


def restore(
    states: WorkerStates, num_workers: int, folder: str | os.PathLike[str], step: int
) -> bool:
    """Gives the workers what `save` has written.

    Args:
        states: `WorkerStates`.
        num_workers: Number of workers.
        folder: Where `save` has written.
        step: Number of the step.

    Returns:
        Whether there was anything of this step.
    """
    found = {}
    for name, worker, of_step in _files(folder):
        if of_step != step:
            continue
        if worker >= num_workers:
            logger.warning(
                "%s is not restored: there are %d workers now, and what worker-%d has left out of "
                "its gradients is lost",
                name,
                num_workers,
                worker,
            )
            continue
        found[worker] = _read(os.path.join(folder, name))
    if found:
        states.restore(found)
    return bool(found)


def _files(folder):
    """Names of files, with their workers and steps."""
    if not tf.io.gfile.isdir(folder):
        return []
    matches = [_FILE.match(name) for name in tf.io.gfile.listdir(folder)]
    return [(match[0], int(match[1]), int(match[2])) for match in matches if match]


def _write(path, arrays):
    # As bytes: NumPy's files know nothing of bfloat16.
    octets = {str(i): np.frombuffer(a.tobytes(), np.uint8) for i, a in enumerate(arrays.values())}
    forms = [[name, list(array.shape), array.dtype.name] for name, array in arrays.items()]
    content = io.BytesIO()
    np.savez(content, forms=np.frombuffer(json.dumps(forms).encode(), np.uint8), **octets)
    temporary = path + ".tmp"
    with tf.io.gfile.GFile(temporary, "wb") as file:
        file.write(content.getvalue())
    tf.io.gfile.rename(temporary, path, overwrite=True)


def _read(path):
    with open_file(path) as file:
        content = io.BytesIO(file.read())
    with np.load(content) as stored:
        forms = json.loads(stored["forms"].tobytes())
        return {
            name: np.frombuffer(
                stored[str(i)].tobytes(), tf.as_dtype(dtype).as_numpy_dtype
            ).reshape(shape)
            for i, (name, shape, dtype) in enumerate(forms)
        }
