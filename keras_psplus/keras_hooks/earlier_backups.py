"""What workers keep, in the files of versions that wrote no digests.

Such a file has the number of a step in its name, which is found again by the model's iterations.
"""

import json

from keras.src.utils import file_utils

from keras_psplus.keras_hooks import compression_backup as files
from keras_psplus.keras_hooks.backup_states import STEP
from keras_psplus.keras_hooks.ownership import asynchronous


def position(strategy, folder):
    """Which step the state in a folder is of, where its variables do not tell; else None."""
    path = file_utils.join(folder, STEP)
    if strategy.updates is None or not file_utils.exists(path):
        return None
    with file_utils.File(path, "r") as f:
        return json.loads(f.read())


def restore(strategy, model, folder, position=None):
    """Reads what workers wrote at the step that the model is at now, on all of them or on none.

    Args:
        strategy: The strategy.
        model: The model, as the chief has restored it.
        folder: The folder of what was saved, on this worker.
        position: The step that was noted with the model, or None.
    """
    number = _number(strategy, model, position)
    if asynchronous(strategy) is not None:
        strategy.restore_compression_state(files.folder_in(folder), number)
        return
    if not files.keeps(strategy):
        return
    path = files.path_of(strategy, folder, number)
    found = file_utils.exists(f"{path}.index")
    control = strategy.extended.control
    votes = control.exchange("compression state", str(int(found))) if control else [found]
    if all(int(vote) for vote in votes):
        # States are made by the first step, and get their values then.
        files.states(strategy, model).read(path).expect_partial()
    else:
        missing = ", ".join(f"worker {i}" for i, vote in enumerate(votes) if not int(vote))
        files.warn_lost(f"{missing} has no file for this step", path)


def _number(strategy, model, position):
    steps = files.number_of_steps(model)
    if asynchronous(strategy) is not None:
        number, of_update = files.number_of_batches(strategy, model), files.MANY
        # Of another model, if the chief died before it had noted this one's.
        fits = position is not None and position // of_update == number // of_update
        return position if fits else number
    of_update = getattr(strategy.updates, "steps", 1)
    fits = position is not None and position // of_update == steps
    return position if fits else steps * of_update
