"""Beside a backup: what compressors keep of gradients, in one file that the chief writes."""

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
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
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.pipeline.failure import OF_TASKS
from keras_psplus.pipeline.replicas.residuals import Residuals

_FILE = re.compile(r"^(\d+)-pipelines-step-(\d+)\.zip(\.tmp)?$")


class PipelineWorkerFiles(WorkerFiles):
    """The residuals of all pipelines; no file, where there are none."""

    def __init__(self, strategy: tf.distribute.Strategy, residuals: Residuals) -> None:
        super().__init__(strategy)
        self._residuals = residuals

    def save(
        self,
        model: keras.Model,
        folder: str,
        what: str,
        names_in_use: Callable[[], Collection[str] | None],
        make_folder: Callable[[str], Any] | None = None,
        waits: bool = False,
    ) -> dict[str, str] | None:
        if not self._residuals.has_any:
            return {}
        before, step = self._files(folder), number_of_steps(model)
        while step in before.values():
            step += 1
        name = f"{self._strategy.pipelines}-pipelines-step-{step}.zip"
        path = file_utils.join(folder_in(folder), name)
        try:
            (make_folder or tf.io.gfile.makedirs)(folder_in(folder))
            self._residuals.write(f"{path}.tmp")
            tf.io.gfile.rename(f"{path}.tmp", path, overwrite=True)
            files = digests_of([name], folder)
        except OF_TASKS:
            raise  # Of a worker whose residuals were read.
        except (OSError, tf.errors.OpError) as error:
            raise OSError(self._problem(folder, error)) from error
        in_use = names_in_use()
        if in_use is not None:
            with contextlib.suppress(OSError, tf.errors.OpError):
                remove(set(before).difference(in_use), folder)
        return files

    def problems(self, folder: str, saved: Sequence[dict[str, str]]) -> list[list[str]]:
        return [problems_of(files, folder) for files in saved]

    def _read(self, model, folder, files):
        for name in files:
            path, found = file_utils.join(folder_in(folder), name), _FILE.match(name)
            if self._strategy.compression is None:
                continue
            if found is None or int(found[1]) != self._strategy.pipelines:
                warn_lost("the number of pipelines has changed", path)
            else:
                self._residuals.read(path)

    def _files(self, folder):
        """Names of the files, complete or not, and their steps."""
        if not file_utils.exists(folder_in(folder)):
            return {}
        matches = [_FILE.match(name) for name in file_utils.listdir(folder_in(folder))]
        return {match[0]: int(match[2]) for match in matches if match}
