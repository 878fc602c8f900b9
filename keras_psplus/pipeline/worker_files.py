"""Beside a backup: nothing, as stages keep nothing that is not a variable."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras

from keras_psplus.core.worker_files import WorkerFiles


class NoWorkerFiles(WorkerFiles):
    """No files."""

    def save(
        self,
        model: keras.Model,
        folder: str,
        what: str,
        names_in_use: Callable[[], Collection[str] | None],
        make_folder: Callable[[str], Any] | None = None,
        waits: bool = False,
    ) -> dict[str, str] | None:
        return {}

    def problems(self, folder: str, saved: Sequence[dict[str, str] | None]) -> list[list[str]]:
        return [[] for _ in saved]

    def restore(self, model: keras.Model, folder: str, files: Any, problems: Sequence[str]) -> None:
        pass

    def restore_earlier(self, model: keras.Model, folder: str, position: int | None = None) -> None:
        pass
