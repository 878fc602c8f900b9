"""Evaluates each checkpoint that a cluster writes while it trains, in a process beside it."""

from __future__ import annotations

import os
import pathlib
import threading
import time
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from typing import IO, Any

import h5py
import keras

from keras_psplus import activation
from keras_psplus.arguments import folder, seconds, whole_number
from keras_psplus.cluster import serving
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.discovery.find import find_task_config
from keras_psplus.cluster.environment import TRAINING_END_VARIABLE
from keras_psplus.cluster.monitor import task_report
from keras_psplus.log import logger

_SUFFIXES = (".weights.h5", ".keras")
# Identity of a file: its time, size and inode.
_Identity = tuple[int, int, int]


class SidecarEvaluator:
    """Evaluates a model on each new checkpoint, as `tf.keras.utils.SidecarEvaluator` does.

    It is for a process of the task type `evaluator`, which stands beside the cluster:
    `keras-psplus run --evaluator` starts one. Training does not wait for it.

    A checkpoint is a file whose name ends in `.weights.h5` or `.keras`, as
    `keras.callbacks.ModelCheckpoint` writes them. All files are evaluated once, in the order of
    their times, also those that are there at the beginning. A file counts when it has stayed the
    same from one look to the next and can be read.

    Args:
        model: A compiled Keras model whose variables are made. It gets the checkpoints' weights.
        data: What `model.evaluate` takes: a `tf.data.Dataset`, or a tuple `(x, y)` or
            `(x, y, sample_weight)` of arrays.
        checkpoint_dir: Path of the folder of the checkpoints. It need not be there yet.
        steps: Number of batches of each evaluation; None for all.
        max_evaluations: Number of evaluations after which it ends; None for no limit.
        callbacks: List of callbacks for the evaluations. `keras.callbacks.TensorBoard` writes
            `evaluation_<metric>_vs_iterations`.
        poll_seconds: Seconds from one look at the folder to the next.

    Raises:
        ValueError: If an argument is of no use.

    Example:

    ```python
    strategy = keras_psplus.strategy_from_env()
    with strategy.scope():
        model = make_compiled_model()
    if keras_psplus.task_type() == "evaluator":
        board = keras.callbacks.TensorBoard("logs/evaluator")
        keras_psplus.SidecarEvaluator(model, test_data, "checkpoints", callbacks=[board]).start()
    else:
        saves = keras.callbacks.ModelCheckpoint("checkpoints/{epoch}.weights.h5")
        model.fit(train_data, epochs=9, callbacks=[saves])
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        *,
        poll_seconds: float = 1.0,
    ) -> None:
        activation.activate()
        if not isinstance(model, keras.Model) or not model.built or not model.compiled:
            raise ValueError(
                "`model` must be a compiled Keras model whose variables are made: begin it with "
                f"`keras.Input`, or call `model.build(input_shape)`. Received: model={model!r}"
            )
        if checkpoint_dir is None:
            raise ValueError("`checkpoint_dir` must be a path. Received: checkpoint_dir=None")
        self._folder = pathlib.Path(folder("checkpoint_dir", checkpoint_dir) or "")
        self._steps = None if steps is None else whole_number("steps", steps, 1)
        most = max_evaluations
        self._most = None if most is None else whole_number("max_evaluations", most, 1)
        self._poll_seconds = seconds("poll_seconds", poll_seconds)
        self._model, self._data, self._callbacks = model, data, list(callbacks or ())
        self._seen: dict[str, _Identity] = {}
        self._done: dict[str, _Identity] = {}
        self._count = 0

    def start(self) -> None:
        """Evaluates checkpoints until training has ended, or as many as `max_evaluations`.

        Training has ended when the chief (worker 0, if there is none) has: the checkpoints that are
        there then are evaluated before it returns. Without a cluster it goes on for good.
        """
        ended = _TrainingEnd(find_task_config())
        while True:
            has_ended = ended.is_set()  # Before the look: nothing is written after it.
            ready, changing = self._look()
            for path, identity in ready:
                self._done[path.name] = identity
                if self._evaluate(path):
                    self._count += 1
                    if self._count == self._most:
                        return
            if has_ended and not changing:
                if not self._count:
                    logger.warning("training has ended, and left no checkpoint in %s", self._folder)
                return
            time.sleep(self._poll_seconds)

    def _look(self) -> tuple[list[tuple[pathlib.Path, _Identity]], bool]:
        """Finds new checkpoints, the oldest first, and whether there are some that may change."""
        found = {path.name: (path, identity) for path, identity in _checkpoints(self._folder)}
        new = [each for name, each in found.items() if self._done.get(name) != each[1]]
        ready = [(path, i) for path, i in new if self._seen.get(path.name) == i]
        self._seen = {name: identity for name, (_, identity) in found.items()}
        return sorted(ready, key=lambda each: each[1][0]), len(ready) < len(new)

    def _evaluate(self, path: pathlib.Path) -> bool:
        """Evaluates a checkpoint; returns whether that was possible."""
        model = self._model
        try:
            step = _step_of(path)
            with warnings.catch_warnings():
                # The optimizer's variables are of no use here, and need not be there.
                warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
                model.load_weights(path)
        except FileNotFoundError:
            return False  # ModelCheckpoint has deleted or replaced it.
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s is no checkpoint of this model, and is left out: %s", path, error)
            return False
        if step is None:
            step = self._count + 1
        # TensorBoard's callback writes at this step.
        iterations = getattr(model.optimizer, "iterations", None)
        if iterations is not None:
            iterations.assign(step)
        data = self._data if isinstance(self._data, tuple) else (self._data,)
        names = ("x", "y", "sample_weight")
        results = model.evaluate(
            **dict(zip(names, data)),
            steps=self._steps,
            callbacks=self._callbacks,
            return_dict=True,
            verbose=0,
        )
        told = ", ".join(f"{name}: {value:.6g}" for name, value in results.items())
        logger.info("evaluated %s, of step %d: %s", path.name, step, told)
        report = task_report.current()
        if report is not None:
            report.evaluation(path.name, step, results)
        return True


class _TrainingEnd(threading.Event):
    """Event that is set when training has ended.

    The launcher says so, or the chief could be reached once and has ended.
    """

    def __init__(self, task: TaskConfig | None) -> None:
        super().__init__()
        if task is not None:
            threading.Thread(target=self._wait, args=(task,), daemon=True).start()

    def _wait(self, task: TaskConfig) -> None:
        if os.environ.get(TRAINING_END_VARIABLE) == "stdin":
            while os.read(0, 4096):
                pass
        else:
            serving.wait_for_end_of_chief(task)
        self.set()


def _checkpoints(where: pathlib.Path) -> Iterable[tuple[pathlib.Path, _Identity]]:
    """The checkpoints in a folder, complete or not, with what they are known by."""
    try:
        entries = [entry for entry in os.scandir(where) if entry.name.endswith(_SUFFIXES)]
    except FileNotFoundError:
        return
    for entry in entries:
        try:
            found = entry.stat()
        except FileNotFoundError:
            continue
        if entry.is_file() and not entry.name.startswith("."):
            yield pathlib.Path(entry.path), (found.st_mtime_ns, found.st_size, found.st_ino)


def _step_of(path: pathlib.Path) -> int | None:
    """The optimizer's number of steps in a checkpoint; None if it has none."""
    if path.name.endswith(".keras"):
        with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file:
            return _iterations(file)
    with open(path, "rb") as file:
        return _iterations(file)


def _iterations(file: str | IO[bytes]) -> int | None:
    with h5py.File(file, "r") as weights:
        for name in ("optimizer/vars/0", "optimizer/inner_optimizer/vars/0"):
            if name in weights and weights[name].shape == ():
                return int(weights[name][()])
    return None
