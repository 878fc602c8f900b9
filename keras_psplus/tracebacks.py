"""Tracebacks of the user's own frames, the cause last.

Between a script and its callback or layer there are dozens of frames of TensorFlow, Keras and this
library, which say nothing about a mistake in the script.
"""

import contextlib
import os
import pathlib
import re
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import keras
import tensorflow as tf

FULL_VARIABLE = "KERAS_PSPLUS_FULL_TRACEBACK"

_LIBRARIES = [
    str(pathlib.Path(path).resolve().parent)
    for path in (tf.__file__, keras.__file__, pathlib.Path(__file__))
]
# What a library's function comes through on the way to the script's.
_BETWEEN = [
    str(pathlib.Path(module.__file__).resolve())  # type: ignore[arg-type]
    for module in (contextlib, threading)
]
_FRAME = re.compile(r'^ *File "(.*)", line \d+, in .*\n(?:[ \t]*\n)?', re.MULTILINE)
_HEAD = "Traceback (most recent call last):\n"


def is_library(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one of TensorFlow, Keras or this library."""
    path = str(pathlib.Path(path).resolve())
    return path in _BETWEEN or any(path.startswith(folder + os.sep) for folder in _LIBRARIES)


class _Uncaught:
    """Exceptions that end the process, which `sys.excepthook` is called with.

    They are shown without the frames of libraries. Not if the environment has
    `KERAS_PSPLUS_FULL_TRACEBACK=1`, if Keras shows all of its frames
    (`keras.config.disable_traceback_filtering()`), or if the script shows them by its own function.

    Attributes:
        reporters: List of functions of an exception's class and the exception, called before it is
            shown. Each returns a function to be called afterwards, or None.
    """

    def __init__(self) -> None:
        self.reporters: list[Callable[[type[BaseException], BaseException], Any]] = []

    def show(self, call: Any) -> None:
        """`sys.excepthook`, replaced like functions of Keras; see `keras_hooks.runtime`."""
        kind, (error, trace) = call.owner, call.args
        waits = [report(kind, error) for report in self.reporters]
        show = _show if call.original is sys.__excepthook__ else call.original
        show(kind, error, trace)
        for wait in waits:
            if wait is not None:
                wait()


UNCAUGHT = _Uncaught()


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        if os.environ.get(FULL_VARIABLE, "0") in ("", "0") and _keras_filters():
            sys.stderr.write(folded(error))
            sys.stderr.flush()
            return
    except Exception:  # What cannot be folded is shown as it is.
        pass
    sys.__excepthook__(kind, error, trace)


def folded(error: BaseException) -> str:
    """The traceback of an exception without the frames of libraries.

    Args:
        error: The exception. One that has no other frames is shown with all of them.
    """
    found = traceback.TracebackException.from_exception(error, compact=True)
    hidden = _fold(found, error)
    text = "".join(found.format())
    if not hidden:
        return text
    # TensorFlow puts the stack at which a node was made into its message.
    text = _FRAME.sub(lambda frame: "" if is_library(frame[1]) else frame[0], text)
    before, head, after = text.rpartition(_HEAD)
    note = (
        f"  ({hidden} frames of TensorFlow, Keras and keras_psplus are left out; "
        f"{FULL_VARIABLE}=1 shows them)\n"
    )
    return f"{before}{head}{note}{after}"


def _fold(found: traceback.TracebackException, error: BaseException) -> int:
    """Removes the libraries' frames from an exception and its causes; counts them."""
    cause = error.__cause__ if error.__cause__ is not None else error.__context__
    ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    if ours and isinstance(cause, tf.errors.OpError):
        found.__cause__, found.__suppress_context__ = None, True  # its message has what counts
    hidden = 0
    for of_found, of_error in (
        (found.__cause__, error.__cause__),
        (None if found.__suppress_context__ else found.__context__, error.__context__),
    ):
        if of_found is not None and of_error is not None:
            hidden += _fold(of_found, of_error)
    own = [frame for frame in found.stack if not is_library(frame.filename)]
    if own:
        hidden += len(found.stack) - len(own)
        found.stack = traceback.StackSummary.from_list(own)
    return hidden


def _keras_filters() -> bool:
    return bool(keras.config.is_traceback_filtering_enabled())
