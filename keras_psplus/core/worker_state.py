"""State that workers keep from step to step: residuals, sums, momenta, local copies.

It belongs to an optimizer and differs from worker to worker, so that no file of Keras holds it.
Each strategy has a back end, which finds the arrays of an optimizer:

    all-reduce           variables of this process's replicas
    parameter servers    resources of remote workers, which the chief asks for

States are made when a step first needs them. Loaded values wait for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.arguments import shown
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.core.base.optimizers import optimizers_of, steps_of, unwrapped
from keras_psplus.files import integrity
from keras_psplus.files.integrity import open_file
from keras_psplus.files.replace import sync
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.jobs.control import ControlPlane

# Loaded values of states that a step has yet to make.

Forms = Mapping[str, tuple[tf.TensorShape, tf.DType]]
_MOST_NAMES = 3


class WaitingValues:
    """Values by the names of states, which are made when a step is traced.

    Values of a backup that do not fit are left out; those of `load_state_dict` raise: the next step
    has to make all states that have values, and no others.
    """

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}
        self._is_strict = False
        # Training steps of this process when values were put.
        self._steps = 0

    def put(
        self, values: Mapping[str, np.ndarray], forms: Forms, is_strict: bool
    ) -> dict[str, np.ndarray]:
        """Replaces what waits.

        Returns:
            Those of states that exist, in their dtypes.
        """
        missing = [name for name in forms if name not in values]
        if is_strict and missing:
            raise _misfit(f"it has nothing for {_listed(missing)}", values)
        fitting = self._fitting({n: values[n] for n in forms if n in values}, forms, is_strict)
        self._values = {name: value for name, value in values.items() if name not in forms}
        self._is_strict, self._steps = is_strict and bool(values), Progress.total
        return fitting

    def take(self, forms: Forms, is_partial: bool = False) -> dict[str, np.ndarray]:
        """Takes the values of states that are made together."""
        found = {name: self._values.pop(name) for name in forms if name in self._values}
        if self._is_strict and not is_partial and len(found) < len(forms):
            others = {**found, **self._values}
            if others or Progress.total == self._steps:
                raise _misfit(
                    f"it has nothing for {_listed(n for n in forms if n not in found)}", others
                )
        return self._fitting(found, forms, self._is_strict)

    def _fitting(
        self, values: Mapping[str, np.ndarray], forms: Forms, is_strict: bool
    ) -> dict[str, np.ndarray]:
        fitting = {}
        for name, value in values.items():
            shape, dtype = forms[name]
            value = typed(np.asarray(value), dtype)
            if shape.is_compatible_with(value.shape) and value.dtype == dtype.as_numpy_dtype:
                fitting[name] = value
                continue
            problem = (
                f"{name} has the shape {value.shape} and dtype {value.dtype.name}, not {shape} "
                f"and {dtype.name}"
            )
            if is_strict:
                raise _misfit(problem, values)
            logger.warning("what a worker had kept is not restored: %s", problem)
        return fitting


def _misfit(problem: str, values: Iterable[str]) -> ValueError:
    return ValueError(
        "The state is not one of this optimizer's: it comes from another model, compressor or "
        f"`updates`. Load what `state_dict` has returned under the same ones: {problem}. "
        f"Received: a state with {_listed(values) or 'nothing'}"
    )


def _listed(names: Iterable[str]) -> str:
    return text_table.listed(sorted(names), _MOST_NAMES)


def typed(array: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """Array of a file in its dtype; NumPy's files do not support bfloat16."""
    is_unknown = array.dtype.kind == "V" and array.dtype.itemsize == dtype.size
    return array.view(dtype.as_numpy_dtype) if is_unknown else array


_NAME = re.compile(r"([a-z]+)-(\d+)-of-(\d+)/(.+)", re.DOTALL)


class WorkerState:
    """Base class of back ends.

    Attributes:
        kind: Word for what has a state of its own: a replica or a worker.
    """

    kind = "replica"

    def __init__(self, finish_steps: Callable[[], Any] = lambda: None) -> None:
        self.finish_steps = finish_steps

    # Back ends define these.

    @property
    def has_any(self) -> bool:
        """Whether there is something to save; the same on all workers."""
        raise NotImplementedError

    @property
    def may_keep(self) -> bool:
        """Whether there is something to restore, as far as arguments of the strategy tell."""
        return True

    @property
    def control(self) -> ControlPlane | None:
        """Control plane, where each process has a part of the state; else None."""
        return None

    @property
    def units(self) -> Sequence[int]:
        """Numbers of the replicas or workers whose state this process has."""
        raise NotImplementedError

    @property
    def total(self) -> int:
        """Number of all of them."""
        raise NotImplementedError

    @property
    def layout(self) -> str:
        """Beginning of the name of this process's files, which no other layout shares."""
        raise NotImplementedError

    def owners(self, model: keras.Model) -> dict[str, Any]:
        """Owners of states by names: the optimizers that a model and its methods reach."""
        return dict(optimizers_of(model))

    def arrays(self, owner: Any, unit: int) -> Iterable[tuple[str, np.ndarray]] | None:
        """Names and arrays of an owner's state on a unit; None if unreachable."""
        raise NotImplementedError

    def assign(
        self, owner: Any, values: Mapping[int, Mapping[str, np.ndarray]], is_strict: bool
    ) -> None:
        """Gives the owner's states their values, now or when a step makes them."""
        raise NotImplementedError

    # Common to all back ends.

    def entries(
        self, owners: Mapping[str, Any], lost: list[int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields names and arrays of some owners' states."""
        for owner_name, owner in owners.items():
            for unit in self.units:
                arrays = () if unit in lost else self.arrays(owner, unit)
                if arrays is None:
                    lost.append(unit)
                    continue
                for name, array in arrays:
                    yield self._prefix(owner_name, unit) + name, array

    def by_unit(
        self, owner_name: str, arrays: Mapping[str, np.ndarray]
    ) -> dict[int, dict[str, np.ndarray]]:
        """Inverse of `entries` for one owner and the units of this process."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for unit in self.units:
            prefix = self._prefix(owner_name, unit)
            found[unit] = {
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
        return found

    def state_dict(self, optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
        self.finish_steps()
        lost: list[int] = []
        found = {n: np.array(a) for n, a in self.entries({"": unwrapped(optimizer)}, lost)}
        for unit in lost:
            self.warn_lost(unit)
        return found

    def load_state_dict(
        self, optimizer: keras.optimizers.Optimizer, state: Mapping[str, np.ndarray]
    ) -> None:
        """Loads what `state_dict` has returned, before the first step as well."""
        self._check(state)
        self.finish_steps()
        self.assign(unwrapped(optimizer), self.by_unit("", state), is_strict=True)

    def warn_lost(self, unit: int) -> None:
        """Says that a unit's state is not saved."""
        logger.warning(
            "%s-%d cannot be reached: what it has left out of its gradients is not saved",
            self.kind,
            unit,
        )

    def _prefix(self, owner_name: str, unit: int) -> str:
        of_owner = f"{owner_name}/" if owner_name else ""
        return f"{of_owner}{self.kind}-{unit}-of-{self.total}/"

    def _check(self, state: Mapping[str, np.ndarray]) -> None:
        if not isinstance(state, Mapping):
            raise ValueError(
                "`state` must be what `state_dict` has returned, a dict of arrays by names. "
                f"Received: state={shown(state)}"
            )
        units = set()
        for name in state:
            match = _NAME.fullmatch(name) if isinstance(name, str) else None
            if match is None or match[1] != self.kind:
                raise ValueError(
                    "`state` must be what `state_dict` has returned under the same strategy, whose "
                    f"names begin with {self.kind!r}. Received: a state with {shown(name)}"
                )
            if int(match[3]) != self.total:
                raise ValueError(
                    f"What workers keep is lost with another number of them: the state is one of "
                    f"{match[3]} {self.kind}s, and there are {self.total}. Leave it out, and "
                    f"training goes on with none of it. Received: a state with {name}"
                )
            units.add(int(match[2]))
        if units and not units.intersection(self.units):
            raise ValueError(
                f"Each worker loads what `state_dict` has returned on it: the state is one of "
                f"{self.kind} {min(units)}, and this process has {self.kind} {self.units[0]}. "
                f"Received: a state with {min(state)}"
            )


# Files of each worker's state beside a backup.
#
# Residuals and accumulated gradients differ from worker to worker, and state that is equal on all
# workers (PowerSGD's factors, counters of batches) has to stay equal: either all workers resume
# with their state, or none does.
#
# 1. Every process that has state writes one file, under a number that no file of its has. 2. All of
# them wait until all have written. 3. The chief commits the job's state, which lists the names and
# the digests of these files. 4. The next save removes files that no state needs.


# File of named arrays: a ZIP archive with one `.npy` entry for each.

# `_EMPTY_BYTES` are those of an archive of nothing, as of a compressor that compresses none.
_ENDING, _EMPTY_BYTES = ".npy", 22


def write(path: str | os.PathLike[str], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes arrays one after the other, of which memory holds one at a time."""
    with tf.io.gfile.GFile(os.fspath(path), "wb") as file:
        stream: Any = _Stream(file)
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays:
                with archive.open(name + _ENDING, "w", force_zip64=True) as part:
                    np.lib.format.write_array(part, np.asarray(array, order="C"))


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a file of `write`.

    bfloat16 comes back as its bytes, as in all of NumPy's files.
    """
    found: dict[str, np.ndarray] = {}
    with open_file(path) as file:
        if file.size() <= _EMPTY_BYTES:
            return found  # ZipFile looks before its begin, which TensorFlow's files refuse.
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with archive.open(name) as part:
                    found[name.removesuffix(_ENDING)] = np.lib.format.read_array(part)
    return found


class _Stream:
    """Sequential file without seeking, all that TensorFlow's files support."""

    def __init__(self, file: tf.io.gfile.GFile) -> None:
        self._file, self.flush = file, file.flush

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data))
        return len(data)


_FILE_ERRORS = OSError, tf.errors.OpError
_EXCHANGE = "worker state"
# Grace period: the launcher may still be ending this job.
_UNREACHABLE_SECONDS = 60.0


class WorkerFiles:
    def __init__(self, strategy: tf.distribute.Strategy, state: WorkerState) -> None:
        self._strategy, self._state = strategy, state
        self._unreachable_since: float | None = None

    def save(
        self,
        model: keras.Model,
        folder: str,
        what: str,
        names_in_use: Callable[[], Collection[str] | None],
        waits: bool = False,
    ) -> dict[str, str] | None:
        """Writes what every worker keeps; when this returns, all workers have written theirs.

        Args:
            folder: The folder of what is saved, on this worker.
            names_in_use: Function without arguments that is called on the chief and returns the
                names of the files that are needed as long as the new ones do not count, or None
                if it is not known.
            waits: Whether workers wait for each other even if they keep nothing.

        Returns:
            Dict from the names of all workers' files to their digests. None if a worker cannot be
            reached: the job may be about to be started again, and would go on without what that
            worker keeps.

        Raises:
            OSError: If a worker cannot write; on all workers.
            PeerLostError: If another worker is gone.
        """
        state, problem = self._state, ""
        files: dict[str, str] = {}
        lost: list[int] = []
        state.finish_steps()
        if not state.has_any and not waits:
            return {}
        if state.has_any:
            try:
                files = self._write(model, folder, lost)
            except _FILE_ERRORS as error:
                problem = self._problem(folder, error)
            if self._is_too_early(lost):
                _remove(files, folder)
                logger.warning(
                    "nothing is saved now, as worker-%d cannot be reached, and what it has left "
                    "out of its gradients would be missing; what was saved before stays",
                    lost[0],
                )
                return None
            for unit in lost:
                state.warn_lost(unit)
        in_use = names_in_use() if self._strategy.is_chief else None
        listed = None if in_use is None else list(in_use)
        answers: list[dict[str, Any]] = [{"problem": problem, "files": files, "in_use": listed}]
        if state.control is not None:
            texts = state.control.exchange(what, json.dumps(answers[0]))
            answers = [json.loads(text) for text in texts]
        problem = next((one["problem"] for one in answers if one["problem"]), "")
        if problem:
            _remove(files, folder)
            raise OSError(problem)
        in_use = answers[0]["in_use"]
        if state.has_any and in_use is not None:
            _remove(set(self._files(folder)).difference(files, in_use), folder)
        return {name: digest for one in answers for name, digest in one["files"].items()}

    def problems(self, folder: str, saved: Sequence[dict[str, str]]) -> list[list[str]]:
        """Checks the workers' files of some states; on all workers."""
        if not self._state.may_keep:
            return [[] for _ in saved]
        found = [self._problems_of(folder, files) for files in saved]
        control = self._state.control
        if control is None:
            return found
        answers = control.exchange(_EXCHANGE, json.dumps(found))
        return [sum(of_state, []) for of_state in zip(*map(json.loads, answers))]

    def restore(
        self, model: keras.Model, folder: str, files: dict[str, str], problems: Sequence[str]
    ) -> None:
        """Reads what `save` has written, on all workers or on none."""
        state = self._state
        state.finish_steps()
        if problems:
            _warn_lost("; ".join(problems), folder)
        elif not files and state.has_any:
            _warn_lost("it has no files of workers", folder)
        elif files and state.may_keep:
            (name,) = self._own(files)
            arrays = read(file_utils.join(_folder_in(folder), name))
            for owner_name, owner in state.owners(model).items():
                state.assign(owner, state.by_unit(owner_name, arrays), is_strict=False)

    def delete(self, folder: str) -> None:
        _remove(self._files(folder), folder)

    def _write(self, model: keras.Model, folder: str, lost: list[int]) -> dict[str, str]:
        tf.io.gfile.makedirs(_folder_in(folder))
        used, number = set(self._files(folder).values()), steps_of(model)
        while number in used:
            # Of a state that counts, or of one that was never written to its end.
            number += 1
        name = f"{self._state.layout}-step-{number:010d}.zip"
        path = file_utils.join(_folder_in(folder), name)
        try:
            write(f"{path}.tmp", self._state.entries(self._state.owners(model), lost))
            tf.io.gfile.rename(f"{path}.tmp", path)
            # The disk has it when this returns.
            sync(path)
            return {name: integrity.digest_of_file(path)}
        except _FILE_ERRORS:
            _remove((name, f"{name}.tmp"), folder)
            raise

    def _problems_of(self, folder: str, files: dict[str, str]) -> list[str]:
        own = self._own(files)
        if files and not own:
            return [f"there is no file of {self._state.layout}"]
        paths = {file_utils.join(_folder_in(folder), name): files[name] for name in own}
        found = (integrity.problem_of(path, digest) for path, digest in paths.items())
        return [problem for problem in found if problem]

    def _own(self, files: Iterable[str]) -> list[str]:
        return [name for name in files if name.startswith(f"{self._state.layout}-step-")]

    def _files(self, folder: str) -> dict[str, int]:
        """Files to replace, also those that were not written to their end, and their numbers."""
        if not file_utils.exists(_folder_in(folder)):
            return {}
        # On a disk that workers share, each of them knows its own alone.
        layout = ".+" if self._state.control is None else re.escape(self._state.layout)
        pattern = re.compile(rf"{layout}-step-(\d+)\.zip(\.tmp)?")
        names = file_utils.listdir(_folder_in(folder))
        matches = [(name, pattern.fullmatch(name)) for name in names]
        return {name: int(match[1]) for name, match in matches if match}

    def _is_too_early(self, lost: list[int]) -> bool:
        """Whether to wait for workers that cannot be reached rather than go on without them."""
        if not lost:
            self._unreachable_since = None
            return False
        self._unreachable_since = self._unreachable_since or time.monotonic()
        return time.monotonic() - self._unreachable_since < _UNREACHABLE_SECONDS

    def _problem(self, folder: str, error: Exception) -> str:
        task = self._strategy.task.name if self._strategy.task else "this process"
        reason = getattr(error, "message", None) or f"{error}"
        return f"{task} cannot write to {folder}: {reason}"


def _warn_lost(why: str, folder: str) -> None:
    """Says that all workers begin with nothing kept."""
    logger.warning(
        "what compressors had left out, accumulated gradients and rows read ahead before the last "
        "backup are lost: %s. Training goes on with none of it. Received: %s",
        why,
        _folder_in(folder),
    )


def _folder_in(folder: str) -> str:
    """Subfolder of a backup that holds the worker files."""
    path: str = file_utils.join(folder, "compression")
    return path


def _remove(names: Iterable[str], folder: str) -> None:
    """Removes files of workers by their names; one that cannot be removed does no harm."""
    with contextlib.suppress(*_FILE_ERRORS):
        for name in names:
            path = file_utils.join(_folder_in(folder), name)
            if file_utils.exists(path):
                file_utils.remove(path)
