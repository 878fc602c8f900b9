"""`fit` under `HybridStrategy(snapshot_every=)`: snapshots of steps, and going on from the last.

BackupAndRestore knows epochs only, and has the tables pass through the chief's memory. Here `fit`
goes on after the very batch: those that come before it in the epoch are drawn, and not trained.
"""

import contextlib
import random
import sys
import weakref

import tensorflow as tf
from keras.src import callbacks as keras_callbacks
from keras.src.callbacks import callback_list
from keras.src.trainers import epoch_iterator, trainer

from keras_psplus.all_reduce import failure
from keras_psplus.hybrid import own_folders
from keras_psplus.hybrid.calls import TableServerLostError
from keras_psplus.hybrid.on_chief import on_chief
from keras_psplus.hybrid.strategy import HybridStrategy
from keras_psplus.keras_hooks import compression_backup, earlier_backups, snapshot_variables
from keras_psplus.keras_hooks.ownership import ours
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.log import logger

_WHAT = "snapshot"
_TOLD = "step", "epoch", "batch", "first_epoch", "random"
_runs = weakref.WeakKeyDictionary()


class _Run:
    """How far this process has come.

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

    def __init__(self):
        self.fits = self.step = self.epoch = self.batch = 0
        self.found = self.metrics = self.skips = self.initial_epoch = None
        self.first_epoch = self.random = None
        self.can_skip = False


def install():
    """Installs this module's hooks."""
    callbacks = callback_list.CallbackList
    replace(callbacks, "on_train_begin", ["self", "logs"])(_begin)
    replace(callbacks, "on_epoch_begin", ["self", "epoch", "logs"])(_begin_epoch)
    replace(callbacks, "on_train_batch_end", ["self", "batch", "logs"])(_end_batch)
    replace(callbacks, "on_train_end", ["self", "logs"])(_end)
    replace(epoch_iterator.EpochIterator, "__iter__", ["self"])(_iterate)
    replace(trainer.Trainer, "_get_metrics_result_or_logs", ["self", "logs"])(_end_of_epoch)


def _run_of(strategy):
    strategy = ours(strategy)
    if not isinstance(strategy, HybridStrategy) or strategy.snapshots is None:
        return None, None
    return strategy, _runs.setdefault(strategy, _Run())


def _begin(original, self, logs=None):
    strategy, run = _run_of(getattr(self.model, "_distribute_strategy", None))
    if strategy is None:
        return original(self, logs)
    if any(isinstance(c, keras_callbacks.BackupAndRestore) for c in self.callbacks):
        raise ValueError(
            "`snapshot_every` resumes a job, and so does the BackupAndRestore callback, from "
            "another step: leave one of them out. "
            f"Received: snapshot_every={strategy.snapshots.every} and BackupAndRestore"
        )
    run.fits += 1
    run.skips = run.first_epoch = None
    # A script may catch what breaks off `fit`, and end with an exit code of its own.
    strategy.snapshots.is_needed = True
    run.initial_epoch = self.model._initial_epoch
    _restore(strategy, run, self.model)
    original(self, logs)
    if not strategy.sync and run.epoch is not None:
        # For a server that is started anew before the first one is due.
        _save(strategy, run, self.model)


def _begin_epoch(original, self, epoch, logs=None):
    original(self, epoch, logs)
    strategy, run = _run_of(getattr(self.model, "_distribute_strategy", None))
    if strategy is None:
        return
    # Also for a `fit` that is broken off, and called again.
    self.model._initial_epoch = run.initial_epoch
    run.epoch, run.batch = epoch, 0
    if run.first_epoch is None:
        run.first_epoch = epoch
    if run.skips is not None:
        run.batch, run.can_skip = run.skips[1], True
        for variable, value in zip(self.model.metrics_variables, run.metrics):
            variable.assign(value)


def _end_batch(original, self, batch, logs=None):
    original(self, batch, logs)
    strategy, run = _run_of(getattr(self.model, "_distribute_strategy", None))
    if strategy is None:
        return
    before = run.step
    run.step += batch + 1 - run.batch
    run.batch = batch + 1
    every = strategy.snapshots.every
    if run.step // every > before // every:
        _save(strategy, run, self.model)


def _end(original, self, logs=None):
    original(self, logs)
    strategy, run = _run_of(getattr(self.model, "_distribute_strategy", None))
    if strategy is not None:
        self.model._initial_epoch = run.initial_epoch
        strategy.snapshots.is_needed = run.epoch is None
        if run.epoch is None and run.random is not None:
            version, numbers, gauss = run.random
            random.setstate((version, tuple(numbers), gauss))
        elif run.epoch is not None:
            run.random = random.getstate()


def _iterate(original, self):
    result = original(self)
    strategy, run = _run_of(getattr(self, "_distribute_strategy", None))
    if strategy is None or not run.can_skip:
        return result
    (epochs, batches), run.skips, run.can_skip = run.skips, None, False

    @tf.function(autograph=False)
    def draw(iterator):
        # Not an error if it has ended: of `steps_per_execution`, the last may be fewer.
        iterator.get_next_as_optional()

    if self.num_batches and not self.steps_per_epoch:
        # Shuffled data have another order in each epoch.
        for _ in range(epochs):
            for _ in self._enumerate_iterator():
                pass
        self._epoch_iterator = self._enumerate_iterator()
    for _ in range(0, batches, self.steps_per_execution):
        _, _, iterator = next(self._epoch_iterator)
        for _ in range(self.steps_per_execution):
            draw(iterator)
    return result


def _end_of_epoch(original, self, logs):
    strategy, _ = _run_of(getattr(self, "_distribute_strategy", None))
    if strategy is not None and not logs:
        # An epoch of which nothing was left to train.
        logs = self.get_metrics_result()
    return original(self, logs)


def _save(strategy, run, model):
    """Writes a snapshot; on all workers, at the same step."""
    snapshots, control = strategy.snapshots, strategy.extended.control
    # Whoever is here has sent all that belongs to this step.
    worker_files = compression_backup.save(
        strategy,
        model,
        snapshots.directory,
        _WHAT,
        snapshots.worker_files_in_use,
        make_folder=own_folders.claim,
        waits=True,
    )
    variables = snapshot_variables.variables_of(model)
    facts = {
        "fit": run.fits,
        "epoch": run.epoch,
        "batch": run.batch,
        "first_epoch": run.first_epoch,
        "random": run.random,
        "worker_files": worker_files,
        "variables": snapshot_variables.forms(variables),
    }
    values = {}
    if strategy.is_chief:
        values = {name: variable.numpy() for name, variable in variables.items()}

    def work():
        try:
            with _lost_for_all(strategy):
                snapshots.save(run.step, facts, values)
        except TableServerLostError as error:
            logger.warning("there is no snapshot of step %d: %s", run.step, error)

    on_chief(control, strategy.is_chief, _WHAT, work)


def _restore(strategy, run, model):
    """Brings a model to where the last snapshot was taken, if it was in this `fit` or later."""
    snapshots, control = strategy.snapshots, strategy.extended.control
    variables, values = snapshot_variables.variables_of(model), {}

    def read(folder, listed):
        is_passed = listed["fit"] > run.fits
        if not is_passed:
            snapshot_variables.check(folder, listed, variables)
        dtypes = {
            n: v.dtype
            for n, v in variables.items()
            if snapshot_variables.form(n, v) in listed["variables"]
        }
        values.update(snapshots.load(folder, listed, dtypes, strict=not is_passed))
        # Those of earlier versions have the position, and no digests.
        files = {name: listed.get(name) for name in ("worker_files", "position")}
        return {"is_passed": is_passed, **files, **{name: listed[name] for name in _TOLD}}

    def work():
        with _lost_for_all(strategy):
            if run.fits == 1:
                snapshots.check()
                run.found, result = snapshots.read_newest(read)
                return result
            if run.found is None or run.found[1]["fit"] < run.fits:
                return None
            return read(*run.found)

    told = on_chief(control, strategy.is_chief, _WHAT, work)
    run.epoch, run.batch = 0, 0
    if told is None:
        return
    for name, value in values.items():
        variables[name].assign(value)
    if control is not None:
        with tf.init_scope():
            strategy.extended.broadcast([v._value for v in variables.values()])
    run.random = told["random"]
    if told["is_passed"]:
        # Done before the job was broken off. What the script does next, saving for example, must
        # not find a model that nobody has trained.
        model._initial_epoch, run.epoch = sys.maxsize, None
        if strategy.is_chief:
            snapshot_variables.say_passed(run.fits, model, told["step"], values)
        return
    files = told["worker_files"]
    if files is None:
        earlier_backups.restore(strategy, model, snapshots.directory, told["position"])
    else:
        (problems,) = compression_backup.problems(strategy, snapshots.directory, [files])
        compression_backup.restore(strategy, model, snapshots.directory, files, problems)
    model._initial_epoch = told["epoch"]
    run.step, run.epoch, run.batch = told["step"], told["epoch"], told["batch"]
    run.first_epoch = told["first_epoch"]
    passes = 0 if run.first_epoch is None else run.epoch - run.first_epoch
    run.skips = passes, run.batch
    run.metrics = [variable.numpy() for variable in model.metrics_variables]
    if strategy.is_chief:
        logger.info(
            "training goes on after step %d: batch %d of epoch %d",
            run.step,
            run.batch,
            run.epoch + 1,
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
