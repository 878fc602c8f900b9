"""Files that are whole: digests, reading, and what a full or unreachable disk does."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.files import ownership

# Files opened for reading, if they are regular files.
#
# A FIFO would block its reader without end.


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: str | os.PathLike[str]) -> None:
    """Checks that a path, if there is something, is no FIFO, socket, device or folder."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except (OSError, ValueError):
        return  # Nothing is there, or on no local disk: opening it says so.
    if kind != stat.S_IFREG:
        found = _KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"it is {found}, and no file", os.fspath(path))


def open_file(path: str | os.PathLike[str]) -> tf.io.gfile.GFile:
    """Opens a file to read its bytes.

    Raises:
        OSError: If the path is no file's.
    """
    check_regular(path)
    return tf.io.gfile.GFile(os.fspath(path), "rb")


# SHA-256 digests, by which damaged files are told from whole ones.


_CHUNK_BYTES = 4 << 20
_KEY = "sha256"


def digest_of_file(path: str) -> str:
    """The SHA-256 digest of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def problem_of(path: str, expected: str) -> str | None:
    """Checks a file against its digest.

    Args:
        expected: `digest_of_file` when it was written.

    Returns:
        A text that names the file, or None if it is as it was written.
    """
    if not tf.io.gfile.exists(path):
        return f"{path} is missing"
    try:
        found = digest_of_file(path)
    except (OSError, tf.errors.OpError) as error:
        return f"{path} cannot be read: {error}"
    if found != expected:
        return f"{path} is not as it was written: its SHA-256 is {found}, not {expected}"
    return None


def to_json(content: dict[str, Any], indent: int | None = None) -> str:
    """JSON text of a dict, with a digest of the content."""
    return json.dumps({**content, _KEY: _of_content(content)}, indent=indent)


def from_json(text: str | bytes, must_have_digest: bool = False) -> dict[str, Any]:
    """Reads what `to_json` has made, or any dict without a digest.

    Args:
        must_have_digest: Whether a dict without one is refused.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__} in the place of a JSON object")
    expected = content.pop(_KEY, None)
    if (must_have_digest or expected is not None) and expected != _of_content(content):
        raise ValueError(f"its SHA-256 is {_of_content(content)}, not {expected}")
    return content


def _of_content(content: Any) -> str:
    # As it will be when it is read: keys are text then, and tuples are lists.
    read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


# File that could not be written, and that its library goes on writing to.
#
# HDF5 keeps what it could not write, and tries again when Python ends. If that fails as well, as it
# does on a full disk, the process ends by SIGSEGV.


def divert(path: str) -> None:
    """Has this process write to memory what it still means to write to a file.

    Args:
        path: The file, which is worth nothing any more. Nothing happens if it is not open, or
            where the system does not list the files that are.
    """
    with contextlib.suppress(OSError, AttributeError):
        target = os.stat(path)
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
        for descriptor in opened:
            # The list has had a descriptor of its own.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), target):
                    _replace(descriptor)


def _replace(descriptor: int) -> None:
    # Not the null device: HDF5 also changes the file's length.
    memory = os.memfd_create("unwritten")
    try:
        os.dup2(memory, descriptor, inheritable=False)
    finally:
        os.close(memory)


# Errors of a disk that is full or cannot be reached, with what to do.


ERRORS: tuple[type[Exception], ...] = (OSError, tf.errors.OpError)


@contextlib.contextmanager
def translated(
    message: Callable[[str], str], errors: tuple[type[Exception], ...] = ERRORS
) -> Iterator[None]:
    """Context in which errors of files are raised with another message.

    Args:
        message: Function of the reason, as TensorFlow or the system gives it.
    """
    try:
        yield
    except ownership.FolderInUseError:
        raise
    except errors as error:
        raise OSError(message(getattr(error, "message", None) or f"{error}")) from error
