"""`fit` under `HybridStrategy(snapshot_every=)`: snapshots of steps, and going on from the last.

They hold what BackupAndRestore's files hold (`core.backup.training_state`), and `fit` goes on in
the same way (`core.backup.fit_progress`). Only the tables do not pass through the chief's memory.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from typing import Any

import keras

from keras_psplus.core.backup.resumed import Resumed, weights_of_callbacks
from keras_psplus.core.backup.training_state import TrainingState, build_optimizers
from keras_psplus.core.base.optimizers import other_variables
from keras_psplus.core.jobs import failure
from keras_psplus.core.jobs.chief_only import run_on_chief
from keras_psplus.core.strategy_engine import StrategyEngine
from keras_psplus.hybrid.files import snapshot_folders
from keras_psplus.hybrid.rpc.calls import TableServerLostError
from keras_psplus.hybrid.snapshots import snapshot_variables
from keras_psplus.hybrid.snapshots.snapshot_schedule import Snapshots
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks
from keras_psplus.log import logger

_WHAT = "snapshot"
_SHARED = "step", "random", "training"


class FitSnapshots:
    """The snapshots of a job's calls of `fit`, and how far this process has come.

    Args:
        engine: The strategy's engine.
        snapshots: Its `Snapshots`.
        is_sync: Whether a lost server ends the job.

    Attributes:
        fits: How many calls of `fit` have begun.
        random: Python's state of random numbers when the last `fit` ended, of which Keras draws
            the seeds of the next one's data.
        step, batch: Steps of all epochs, and batches of the present one up to now.
        found: On the chief, the folder and the list of the snapshot that was there at the start.
        is_passed: Whether the present `fit` had ended before that snapshot.
    """

    def __init__(self, engine: StrategyEngine, snapshots: Snapshots, is_sync: bool) -> None:
        self._engine: Any = weakref.ref(engine)
        self._snapshots, self._is_sync = snapshots, is_sync
        self.fits = self.step = self.batch = 0
        self.found: tuple[str, dict[str, Any]] | None = None
        # On the chief, from the first question for them on.
        self._at_start: list[tuple[str, dict[str, Any]]] | None = None
        self._not_taken: OSError | None = None
        self.is_passed = False
        self.random: Any = None

    @property
    def _strategy(self):
        return self._engine().strategy

    def data_seed(self) -> int | None:
        """Data seed of the `fit` that is about to begin, if a snapshot has it."""
        if not self._strategy.is_chief:
            return None
        self._not_taken = None
        try:
            self._snapshots.take()
        except OSError as error:
            self._not_taken = error  # Raised when all workers ask for snapshots.
            return None
        found = [self.found] if self.fits and self.found else self._whole()
        seeds = [
            listed["training"]["data_seed"] for _, listed in found if listed["fit"] == self.fits + 1
        ]
        return seeds[-1] if seeds else None

    def _whole(self):
        """The snapshots that are there; for the first `fit`, they are read once."""
        if self.fits > 1:
            return self._snapshots.whole()
        if self._at_start is None:
            self._at_start = self._snapshots.whole()
        return self._at_start

    def begin(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Before `fit` trains: brings the model to where the last snapshot was taken."""
        snapshots, model = self._snapshots, callbacks.model
        if any(isinstance(c, keras_callbacks.BackupAndRestore) for c in callbacks.callbacks):
            raise ValueError(
                "`snapshot_every` resumes a job, and so does the BackupAndRestore callback, from "
                "another step: leave one of them out. "
                f"Received: snapshot_every={snapshots.every} and BackupAndRestore"
            )
        self.fits += 1
        self.is_passed = False
        # A script may catch what breaks off `fit`, and end with its own exit code.
        snapshots.is_needed = True
        self._restore(model)

    def save_first(self, model: keras.Model) -> None:
        """Writes a snapshot for a server that restarts before the first regular one."""
        if not self._is_sync and not self.is_passed:
            self.save(model)

    def begin_epoch(self) -> None:
        """Notes the beginning of an epoch."""
        self.batch = self._engine().progress.batch

    def end_batch(self, model: keras.Model, batch: int) -> None:
        """Notes the end of a batch, and writes a snapshot if one is due."""
        before = self.step
        self.step += batch + 1 - self.batch
        self.batch = batch + 1
        every = self._snapshots.every
        if self.step // every > before // every:
            self.save(model)

    def end(self) -> None:
        """Notes the end of a `fit`."""
        self._snapshots.is_needed = self.is_passed
        if not self.is_passed:
            self.random = random.getstate()
        elif self.random is not None:
            version, numbers, gauss = self.random
            random.setstate((version, tuple(numbers), gauss))

    def save(self, model: keras.Model) -> None:
        """Writes a snapshot; on all workers, at the same step."""
        engine, strategy = self._engine(), self._strategy
        snapshots, files_of_workers = self._snapshots, engine.worker_files
        # What Keras accumulates is in no worker's file.
        engine.settle(model)
        # A process that is here has sent all that belongs to this step.
        worker_files = files_of_workers.save(
            model,
            snapshots.directory,
            _WHAT,
            snapshots.worker_files_in_use,
            make_folder=snapshot_folders.claim,
            waits=True,
        )
        facts, values = {}, {}
        if strategy.is_chief:
            variables = snapshot_variables.variables_of(model)
            training = engine.progress.state(model, None, has_value=_is_dense)
            values = {name: variable.numpy() for name, variable in variables.items()}
            values.update(training.arrays)
            facts = {
                "fit": self.fits,
                "random": self.random,
                "worker_files": worker_files,
                "variables": snapshot_variables.forms(variables),
                "training": training.facts,
                "arrays": {name: str(array.dtype) for name, array in training.arrays.items()},
            }

        def work():
            try:
                with _lost_for_all(self._is_sync):
                    snapshots.save(self.step, facts, values)
            except TableServerLostError as error:
                logger.warning("there is no snapshot of step %d: %s", self.step, error)

        run_on_chief(engine.control, strategy.is_chief, _WHAT, work)

    def _restore(self, model):
        """Restores the last snapshot, if it was written in this `fit` or later."""
        strategy, control = self._strategy, self._engine().control
        snapshots, files_of_workers = self._snapshots, self._engine().worker_files
        candidates = run_on_chief(control, strategy.is_chief, _WHAT, self._find)
        problems = files_of_workers.problems(
            snapshots.directory, [one["worker_files"] for one in candidates]
        )
        # On all workers at once, who agree on each variable that is made: for the one to be read.
        newest = [one for one, lost in zip(candidates, problems) if not lost] or candidates
        if newest:
            build_optimizers(strategy, model, newest[-1])
        variables, values = snapshot_variables.variables_of(model), {}

        def read(folder, listed):
            is_passed = listed["fit"] > self.fits
            if not is_passed:
                snapshot_variables.check_same_model(folder, listed, model, variables)
            dtypes = {
                n: v.dtype
                for n, v in variables.items()
                if snapshot_variables.form(n, v) in listed["variables"]
            }
            dtypes |= {} if is_passed else listed["arrays"]
            values.update(snapshots.load(folder, listed, dtypes, strict=not is_passed))
            files = listed["worker_files"]
            shared = {name: listed[name] for name in _SHARED}
            return {"is_passed": is_passed, "worker_files": files, **shared}

        def work():
            with _lost_for_all(self._is_sync):
                if self.fits == 1:
                    self.found, result = snapshots.read_newest(self._whole(), read, problems)
                    return result
                return read(*self.found)

        if self.fits > 1 and not candidates:
            return
        shared = run_on_chief(control, strategy.is_chief, _WHAT, work)
        if shared is None:
            return
        for name in variables.keys() & values.keys():
            variables[name].assign(values[name])
        TrainingState({}, values).assign_others(model)
        others = filter(_is_dense, other_variables(model).values())
        self._engine().broadcast_restored([*variables.values(), *others])
        self.random = shared["random"]
        if shared["is_passed"]:
            # Done before the job was broken off. What the script does next, saving for example,
            # must not find a model that nobody has trained.
            model._initial_epoch, self.is_passed = sys.maxsize, True
            if strategy.is_chief:
                snapshot_variables.log_passed_over(self.fits, model, shared["step"], values)
            return
        files = shared["worker_files"]
        (problems,) = files_of_workers.problems(snapshots.directory, [files])
        files_of_workers.restore(model, snapshots.directory, files, problems)
        self._go_on(model, shared, values)

    def _find(self):
        """Facts on readable snapshots for all workers; on the chief."""
        if self._not_taken is not None:
            raise self._not_taken
        if self.fits == 1:
            with _lost_for_all(self._is_sync):
                self._snapshots.check_writable()
            found = self._whole()
        else:
            found = [self.found] if self.found and self.found[1]["fit"] >= self.fits else []
        return [
            {
                "worker_files": listed["worker_files"],
                # A later call of `fit` may have had others.
                "optimizers": listed["training"]["optimizers"]
                if listed["fit"] == self.fits
                else {},
            }
            for _, listed in found
        ]

    def _go_on(self, model, shared, values):
        """Has `fit` go on where the snapshot was taken."""
        engine, facts = self._engine(), shared["training"]
        state = TrainingState(facts, values) if self._strategy.is_chief else None
        of_callbacks = weights_of_callbacks(model, facts, state, engine.broadcast_restored)
        engine.progress.resume(Resumed(model, facts, of_callbacks))
        model._initial_epoch = facts["epoch"]
        self.step, self.batch = shared["step"], facts["batch"]
        if self._strategy.is_chief:
            logger.info(
                "training goes on after step %d: batch %d of epoch %d",
                self.step,
                facts["batch"],
                facts["epoch"] + 1,
            )


def _is_dense(variable):
    return not snapshot_variables.is_table(variable)


@contextlib.contextmanager
def _lost_for_all(is_sync):
    """Context in which a lost server ends a synchronous job."""
    try:
        yield
    except TableServerLostError as error:
        if not is_sync:
            raise
        raise failure.PeerLostError(f"{error}") from None
