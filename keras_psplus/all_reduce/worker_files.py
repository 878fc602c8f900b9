"""Files of each worker's state under all-reduce, beside a backup or a snapshot."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.backup.worker_files import (
    WorkerFiles,
    digests_of,
    folder_in,
    number_of_steps,
    problems_of,
    remove,
    warn_lost,
)
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.keras_internals.keras_parts import file_utils

if TYPE_CHECKING:
    import keras

_WHAT = "compression state"


class MirroredWorkerFiles(WorkerFiles):
    """Every worker writes and reads its own file."""

    def save(
        self,
        model: keras.Model,
        folder: str,
        what: str,
        names_in_use: Callable[[], Collection[str] | None],
        make_folder: Callable[[str], Any] | None = None,
        waits: bool = False,
    ) -> dict[str, str]:
        control, is_chief = self._strategy.extended.control, self._strategy.is_chief
        files: dict[str, str] = {}
        problem: str | None = ""
        if self._keeps:
            try:
                files = self._write(model, folder, make_folder)
            except (OSError, tf.errors.OpError) as error:
                problem = self._problem(folder, error)
        answer: dict[str, Any] = {"problem": problem, "files": files}
        if (self._keeps or waits) and is_chief:
            answer["in_use"] = names_in_use()
        answers = [answer]
        if control is not None and (self._keeps or waits):
            answers = [json.loads(text) for text in control.exchange(what, json.dumps(answer))]
        problem = next((one["problem"] for one in answers if one["problem"]), None)
        if problem:
            with contextlib.suppress(OSError, tf.errors.OpError):
                remove(files, folder)
            raise OSError(problem)
        if self._keeps and answers[0]["in_use"] is not None:
            # Also if it cannot be removed, it does no harm.
            with contextlib.suppress(OSError, tf.errors.OpError):
                remove(set(self._files(folder)).difference(files, answers[0]["in_use"]), folder)
        return {name: digest for one in answers for name, digest in one["files"].items()}

    def problems(self, folder: str, saved: Sequence[dict[str, str]]) -> list[list[str]]:
        own = [self._problems(folder, files) for files in saved]
        control = self._strategy.extended.control
        if control is None or not self._keeps:
            return own
        answers = control.exchange(_WHAT, json.dumps(own))
        return [sum(of_state, []) for of_state in zip(*map(json.loads, answers))]

    def delete(self, folder: str) -> None:
        with contextlib.suppress(OSError, tf.errors.OpError):
            remove(self._files(folder), folder)

    @property
    def _keeps(self):
        """Whether workers keep anything from step to step."""
        strategy = self._strategy
        extended = strategy.extended
        return bool(
            extended.reducers.compresses or strategy.updates is not None or extended.kept_states
        )

    def _write(self, model, folder, make_folder):
        """Writes this worker's files; returns their digests by their names."""
        (make_folder or tf.io.gfile.makedirs)(folder_in(folder))
        used, step = set(self._files(folder).values()), self._number_of_batches(model)
        while step in used:
            # Of a state that counts, or of one that was never written to its end.
            step += 1
        try:
            self._states(model).write(self._path(folder, step))
            return digests_of(self._names(folder, step), folder)
        except (OSError, tf.errors.OpError):
            with contextlib.suppress(OSError, tf.errors.OpError):
                remove(self._names(folder, step), folder)
            raise

    def _read(self, model, folder, files):
        if self._keeps and not files:
            warn_lost("it has no files of workers", folder)
        elif self._keeps:
            (name, *_) = self._own(files)
            path = file_utils.join(folder_in(folder), name.rpartition(".")[0])
            # States are made by the first step, and get their values then.
            self._states(model).read(path).expect_partial()

    def _problems(self, folder, files):
        """Errors of this worker's files for a state."""
        if not self._keeps or not files:
            return []
        files = self._own(files)
        if not files:
            return [f"worker {self._strategy.extended._id_in_cluster} has no file for this step"]
        return problems_of(files, folder)

    def _states(self, model):
        """State of this worker to save, a `tf.train.Checkpoint`."""
        strategy = self._strategy
        found = dict(strategy.extended.kept_states)
        for name, optimizer in optimizers_of(model).items():
            found[name] = strategy.compression_state(optimizer)
            if strategy.updates is not None:
                found[f"{name}_updates"] = strategy.update_state(optimizer)
        return tf.train.Checkpoint(**found)

    def _number_of_batches(self, model):
        """A number that grows with every batch."""
        of_update = self._batches_of_update
        number = number_of_steps(model) * of_update
        if of_update > 1:
            batches = self._strategy.extended.updating.batches
            waiting = sum(batches(optimizer) for optimizer in optimizers_of(model).values())
            number += waiting % of_update
        return number

    @property
    def _batches_of_update(self):
        return 1 if self._strategy.updates is None else self._strategy.updates.steps

    @property
    def _worker(self):
        index, replicas = (
            self._strategy.extended._id_in_cluster,
            self._strategy.num_replicas_in_sync,
        )
        return f"worker-{index}-of-{self._strategy.num_workers}-with-{replicas}-replicas"

    def _path(self, folder, step):
        """The path of this worker's files for a step, without ending."""
        return file_utils.join(folder_in(folder), f"{self._worker}-step-{step}")

    def _own(self, files):
        """Those of some workers' files that are this worker's."""
        beginning = f"{self._worker}-step-"
        return {name: digest for name, digest in files.items() if name.startswith(beginning)}

    def _names(self, folder, step):
        return [name for name, of_step in self._files(folder).items() if of_step == step]

    def _files(self, folder):
        """This worker's files, also those that were not written to their end, and their steps."""
        if not file_utils.exists(folder_in(folder)):
            return {}
        pattern = re.compile(rf"{self._worker}-step-(\d+)[._]")
        fitting = [(name, pattern.match(name)) for name in file_utils.listdir(folder_in(folder))]
        return {name: int(match[1]) for name, match in fitting if match}
