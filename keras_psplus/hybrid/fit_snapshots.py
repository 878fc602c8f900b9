"""`fit` under `HybridStrategy(snapshot_every=)`: snapshots of steps, and going on from the last.

BackupAndRestore knows epochs only, and has the tables pass through the chief's memory. Here `fit`
goes on after the very batch: those that come before it in the epoch are drawn, and not trained.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core import failure
from keras_psplus.core.chief_only import run_on_chief
from keras_psplus.hybrid import snapshot_folders, snapshot_variables
from keras_psplus.hybrid.calls import TableServerLostError
from keras_psplus.keras_parts import callbacks as keras_callbacks
from keras_psplus.log import logger

if TYPE_CHECKING:
    from keras_psplus.hybrid.engine import HybridEngine

_WHAT = "snapshot"
_SHARED = "step", "epoch", "batch", "first_epoch", "random"


class FitSnapshots:
    """The snapshots of a job's calls of `fit`, and how far this process has come.

    Args:
        engine: `HybridEngine` of a strategy with `snapshot_every`.

    Attributes:
        fits: How many calls of `fit` have begun.
        first_epoch: The first one of the present `fit`, whether it was in this process or not.
        random: Python's state of random numbers when the last `fit` ended, of which Keras draws
            the seeds of the next one's data.
        step, epoch, batch: Steps of all epochs, the present epoch, and batches of it up to now.
        found: On the chief, the folder and the list of the snapshot that was there at the start.
        metrics: Values that metrics get once Keras has reset them.
        skips: Epochs of this `fit`, and batches of the next one, whose data are drawn and not
            trained.
        can_skip: Whether the next iteration over data is that of `fit`.
        initial_epoch: What the model had before.
    """

    def __init__(self, engine: HybridEngine) -> None:
        self._engine = weakref.ref(engine)
        self.fits = self.step = self.batch = 0
        self.epoch: int | None = 0
        self.found: tuple[str, dict[str, Any]] | None = None
        self.metrics: list[np.ndarray] | None = None
        self.skips: tuple[int, int] | None = None
        self.initial_epoch: int | None = None
        self.first_epoch: int | None = None
        self.random: Any = None
        self.can_skip = False

    @property
    def _strategy(self):
        return self._engine().strategy

    def begin(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Before `fit` trains: brings the model to where the last snapshot was taken."""
        snapshots, model = self._strategy.snapshots, callbacks.model
        if any(isinstance(c, keras_callbacks.BackupAndRestore) for c in callbacks.callbacks):
            raise ValueError(
                "`snapshot_every` resumes a job, and so does the BackupAndRestore callback, from "
                "another step: leave one of them out. "
                f"Received: snapshot_every={snapshots.every} and BackupAndRestore"
            )
        self.fits += 1
        self.skips = self.first_epoch = None
        self.can_skip = False
        # A script may catch what breaks off `fit`, and end with an exit code of its own.
        snapshots.is_needed = True
        self.initial_epoch = model._initial_epoch
        self._restore(model)

    def save_first(self, model: keras.Model) -> None:
        """Writes a snapshot for a server that is started again before the first one is due."""
        if not self._strategy.sync and self.epoch is not None:
            self._save(model)

    def begin_epoch(self, model: keras.Model, epoch: int) -> None:
        """Notes the beginning of an epoch."""
        # Also for a `fit` that is broken off, and called again.
        model._initial_epoch = self.initial_epoch
        self.epoch, self.batch = epoch, 0
        if self.first_epoch is None:
            self.first_epoch = epoch
        if self.skips is not None:
            self.batch, self.can_skip = self.skips[1], True
            assert self.metrics is not None
            for variable, value in zip(model.metrics_variables, self.metrics):
                variable.assign(value)

    def end_batch(self, model: keras.Model, batch: int) -> None:
        """Notes the end of a batch, and writes a snapshot if one is due."""
        before = self.step
        self.step += batch + 1 - self.batch
        self.batch = batch + 1
        every = self._strategy.snapshots.every
        if self.step // every > before // every:
            self._save(model)

    def end(self, model: keras.Model) -> None:
        """Notes the end of a `fit`."""
        model._initial_epoch = self.initial_epoch
        self._strategy.snapshots.is_needed = self.epoch is None
        if self.epoch is None and self.random is not None:
            version, numbers, gauss = self.random
            random.setstate((version, tuple(numbers), gauss))
        elif self.epoch is not None:
            self.random = random.getstate()

    def skip(self, iterator: Any) -> None:
        """Draws, at the beginning of an iteration, the batches that were trained before."""
        if not self.can_skip:
            return
        assert self.skips is not None
        (epochs, batches), self.skips, self.can_skip = self.skips, None, False

        @tf.function(autograph=False)
        def draw(iterator):
            # Not an error if it has ended: of `steps_per_execution`, the last may be fewer.
            iterator.get_next_as_optional()

        if iterator.num_batches and not iterator.steps_per_epoch:
            # Shuffled data have another order in each epoch.
            for _ in range(epochs):
                for _ in iterator._enumerate_iterator():
                    pass
            iterator._epoch_iterator = iterator._enumerate_iterator()
        for _ in range(0, batches, iterator.steps_per_execution):
            _, _, of_epoch = next(iterator._epoch_iterator)
            for _ in range(iterator.steps_per_execution):
                draw(of_epoch)

    def _save(self, model):
        """Writes a snapshot; on all workers, at the same step."""
        strategy, control = self._strategy, self._engine().control
        snapshots, files_of_workers = strategy.snapshots, self._engine().worker_files
        # Whoever is here has sent all that belongs to this step.
        worker_files = files_of_workers.save(
            model,
            snapshots.directory,
            _WHAT,
            snapshots.worker_files_in_use,
            make_folder=snapshot_folders.claim,
            waits=True,
        )
        variables = snapshot_variables.variables_of(model)
        facts = {
            "fit": self.fits,
            "epoch": self.epoch,
            "batch": self.batch,
            "first_epoch": self.first_epoch,
            "random": self.random,
            "worker_files": worker_files,
            "variables": snapshot_variables.forms(variables),
        }
        values = {}
        if strategy.is_chief:
            values = {name: variable.numpy() for name, variable in variables.items()}

        def work():
            try:
                with _lost_for_all(strategy):
                    snapshots.save(self.step, facts, values)
            except TableServerLostError as error:
                logger.warning("there is no snapshot of step %d: %s", self.step, error)

        run_on_chief(control, strategy.is_chief, _WHAT, work)

    def _restore(self, model):
        """Brings a model to where the last snapshot was taken, if it was in this `fit` or later."""
        strategy, control = self._strategy, self._engine().control
        snapshots, files_of_workers = strategy.snapshots, self._engine().worker_files
        variables, values = snapshot_variables.variables_of(model), {}

        def read(folder, listed):
            is_passed = listed["fit"] > self.fits
            if not is_passed:
                snapshot_variables.check_same_variables(folder, listed, variables)
            dtypes = {
                n: v.dtype
                for n, v in variables.items()
                if snapshot_variables.form(n, v) in listed["variables"]
            }
            values.update(snapshots.load(folder, listed, dtypes, strict=not is_passed))
            # Those of earlier versions have the position, and no digests.
            files = {name: listed.get(name) for name in ("worker_files", "position")}
            return {"is_passed": is_passed, **files, **{name: listed[name] for name in _SHARED}}

        def of_workers():
            with _lost_for_all(strategy):
                snapshots.check_writable()
            return snapshots.worker_files()

        problems = []
        if self.fits == 1:
            of_all = run_on_chief(control, strategy.is_chief, _WHAT, of_workers)
            problems = files_of_workers.problems(snapshots.directory, of_all)

        def work():
            with _lost_for_all(strategy):
                if self.fits == 1:
                    self.found, result = snapshots.read_newest(read, problems)
                    return result
                if self.found is None or self.found[1]["fit"] < self.fits:
                    return None
                return read(*self.found)

        shared = run_on_chief(control, strategy.is_chief, _WHAT, work)
        self.epoch, self.batch = 0, 0
        if shared is None:
            return
        for name, value in values.items():
            variables[name].assign(value)
        self._engine().share_restored(variables.values())
        self.random = shared["random"]
        if shared["is_passed"]:
            # Done before the job was broken off. What the script does next, saving for example,
            # must not find a model that nobody has trained.
            model._initial_epoch, self.epoch = sys.maxsize, None
            if strategy.is_chief:
                snapshot_variables.log_passed_over(self.fits, model, shared["step"], values)
            return
        files = shared["worker_files"]
        if files is None:
            files_of_workers.restore_earlier(model, snapshots.directory, shared["position"])
        else:
            (problems,) = files_of_workers.problems(snapshots.directory, [files])
            files_of_workers.restore(model, snapshots.directory, files, problems)
        model._initial_epoch = shared["epoch"]
        self.step, self.epoch, self.batch = shared["step"], shared["epoch"], shared["batch"]
        self.first_epoch = shared["first_epoch"]
        passes = 0 if self.first_epoch is None else self.epoch - self.first_epoch
        self.skips = passes, self.batch
        self.metrics = [variable.numpy() for variable in model.metrics_variables]
        if strategy.is_chief:
            logger.info(
                "training goes on after step %d: batch %d of epoch %d",
                self.step,
                self.batch,
                self.epoch + 1,
            )


@contextlib.contextmanager
def _lost_for_all(strategy):
    """Where all take a step together, a lost server ends the job."""
    try:
        yield
    except TableServerLostError as error:
        if not strategy.sync:
            raise
        raise failure.PeerLostError(f"{error}") from None
