"""Saving: files and folders appear whole, with any number of writers.

`model.save`, `save_weights` and `export` are called on all workers by some scripts and on the chief
alone by others, on disks that are shared or not, so they can wait for nobody. Every caller writes
to its own temporary folder beside the target and renames: all of them hold the same weights,
and no reader sees half a file. Nor does the restart of a job whose parameter server died while its
variables were being written. The target is there when the call returns, on every worker.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_psplus.core.base.threads import ThreadFlag
from keras_psplus.engine import Call
from keras_psplus.files import atomic, integrity
from keras_psplus.keras_internals.keras_parts import file_utils

_skipped: dict[str, set[str]] = {}
# Raised by a thread that exports.
exporting_flag = ThreadFlag()


def attributes_to_skip(call: Call) -> set[str]:
    """Attributes that are not saved, asked for outside of every scope, once.

    Keras makes an optimizer to list the attributes of each kind. In a strategy's scope that
    optimizer's variables would be distributed, and a chief that saves by itself would wait for the
    others.
    """
    if call.owner not in _skipped:
        # A separate thread is outside of the scope.
        with futures.ThreadPoolExecutor(1) as executor:
            _skipped[call.owner] = executor.submit(call.proceed).result()
    return _skipped[call.owner]


def export(strategy: tf.distribute.Strategy, call: Call) -> Any:
    """Exports a model, or an archive of functions, to a folder that appears whole."""
    with exporting_flag.raised(), written(strategy, call.get("filepath"), True) as path:
        return call.proceed(filepath=path)


def export_copies(strategy: tf.distribute.Strategy, call: Call) -> Any:
    """Exports a model, or an archive, while its variables are copies in this process.

    What is exported is traced now; traced with the variables of parameter servers, it would read
    from them, shard by shard.
    """

    def work() -> Any:
        with with_copies(call.owner, copied):
            try:
                return export(strategy, call)
            except AssertionError as error:
                if "untracked" not in str(error):
                    raise
                refuse_traced(call, repr(call.owner))

    # A separate thread is outside of the strategy's scope even if the caller is inside.
    with futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


def refuse_traced(call: Call, what: str) -> NoReturn:
    """Raises ValueError as functions that are exported were traced before."""
    raise ValueError(
        "A function that is exported reads variables of the strategy, not their copies in this "
        "process: it was traced before, or the archive does not track its model. Call "
        "`archive.track(model)`, and give `archive.add_endpoint` an `input_signature` and a "
        "function that is no tf.function; `model.export` does both. "
        f"Received: {what} under {type(call.engine.strategy).__name__}"
    )


def copied(variable: keras.Variable) -> tf.Variable:
    """A variable of this process with a Keras variable's value."""
    value = variable._value.numpy()
    return tf.Variable(value, trainable=variable.trainable, name=variable.name)


@contextlib.contextmanager
def with_copies(model: Any, copy: Callable[[keras.Variable], Any]) -> Iterator[list[Any]]:
    """Context in which a model computes with copies of its variables, wherever these are.

    Args:
        model: A model, or an archive of functions.
        copy: Function of a variable that returns that of its value.
    """
    for variable in model.variables:
        # Pipelines make a variable when it is read, or a model is cut into stages.
        if variable._value is None:
            variable.numpy()
    before = [(variable, variable._value) for variable in model.variables]
    try:
        for variable, _ in before:
            variable._value = copy(variable)
        yield [variable._value for variable, _ in before]
    finally:
        for variable, value in before:
            variable._value = value


def save(strategy: tf.distribute.Strategy, call: Call) -> Any:
    """Saves a model, or its weights, to a file or folder that appears whole."""
    filepath, overwrite = call.get("filepath"), call.get("overwrite", True)
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    if path is None:
        # A file object of the caller's own.
        return call.proceed()
    if path.startswith("hf://"):
        # A commit for each worker would be as many commits of the same.
        return call.proceed() if strategy.is_chief else None
    if not overwrite and os.path.exists(path):
        return call.proceed()
    # A folder's parents are made by Keras, a file's are not.
    makes_folders = call.get("zipped") is False
    with written(strategy, path, makes_folders) as own:
        return call.proceed(filepath=own, overwrite=True)


def save_in_place(call: Call) -> Any:
    """Saves a model, or its weights, as Keras does; a full disk is survived."""
    try:
        return call.proceed()
    except Exception:
        filepath = call.get("filepath")
        if isinstance(filepath, (str, os.PathLike)):
            integrity.divert(os.fspath(filepath))
        raise


@contextlib.contextmanager
def written(
    strategy: tf.distribute.Strategy, filepath: str | os.PathLike[str], makes_folders: bool
) -> Iterator[str]:
    """Context that returns the path to write to instead of the script's."""
    path = os.fspath(filepath)
    folder = os.path.dirname(os.path.realpath(path))
    if file_utils.is_remote_path(path):
        writing: contextlib.AbstractContextManager[str] = atomic.uploaded(path)
    elif makes_folders or os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        writing = atomic.written(path, strategy.task.name if strategy.task else None)
    else:
        # Keras says what is wrong with it.
        writing = contextlib.nullcontext(path)
    with writing as own, SHOWN.instead_of(str(own), path):
        try:
            yield own
        except Exception as error:
            integrity.divert(own)
            error.args = tuple(SHOWN.as_given(one) for one in error.args)
            if getattr(error, "filename", None):
                error.filename = SHOWN.as_given(error.filename)  # type: ignore[attr-defined]
            raise


class _ShownPaths:
    """Paths that are being written, and the script's paths that they stand for."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    @property
    def is_writing(self) -> bool:
        return bool(self._shown)

    @contextlib.contextmanager
    def instead_of(self, written_to: str, given: str) -> Iterator[None]:
        """Context in which messages show the script's path instead of the one written to."""
        self._shown[written_to] = given
        try:
            yield
        finally:
            del self._shown[written_to]

    def as_given(self, text: Any) -> Any:
        """A text of Keras's with the paths that the script has given."""
        for pair in list(self._shown.items()) if isinstance(text, str) else ():
            text = text.replace(*pair)
        return text

    def show_message(self, call: Call) -> Any:
        """Prints Keras's message with the script's path in it."""
        return call.original(self.as_given(call.owner), *call.args, **call.kwargs)


SHOWN = _ShownPaths()
