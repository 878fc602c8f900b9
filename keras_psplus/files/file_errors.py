"""Errors of a disk that is full or cannot be reached, with what to do."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from keras_psplus.files import ownership

ERRORS: tuple[type[Exception], ...] = (OSError, tf.errors.OpError)


@contextlib.contextmanager
def translated(
    message: Callable[[str], str], errors: tuple[type[Exception], ...] = ERRORS
) -> Iterator[None]:
    """Context in which errors of files are raised with another message.

    Args:
        message: Function of the reason, as TensorFlow or the system gives it.

    Raises:
        OSError: In their place.
    """
    try:
        yield
    except ownership.FolderInUseError:
        raise
    except errors as error:
        raise OSError(message(getattr(error, "message", None) or f"{error}")) from error
