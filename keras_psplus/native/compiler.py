"""Compiles the library's C++ kernels for the TensorFlow that is installed, once on a machine."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import tensorflow as tf

from keras_psplus.log import info_once

_FOLDER = pathlib.Path(__file__).parent
_SOURCES, _HEADERS = sorted(_FOLDER.glob("*.cc")), sorted(_FOLDER.glob("*.h"))
_COMPILERS = ("g++", "clang++", "c++")
# A product that is rounded together with a sum would not give TensorFlow's bits.
_OPTIONS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-w")
# Seconds: a compiler takes 10 to 30.
_TIMEOUT = 240
# Seconds after which a compiler that has failed is tried again: a disk may have been full.
_FAILED_FOR = 24 * 3600


class BuildError(Exception):
    """There are no kernels; the message says why."""


def build():
    """Compiles the kernels, unless that has been done before.

    What is compiled is kept in the user's cache, under a name that depends on the kernels and on
    TensorFlow. Of several processes one compiles, and the others wait for it. Who finds it there
    needs no compiler, and need not be allowed to write.

    Returns:
        Path of the shared library.

    Raises:
        BuildError: If there is no compiler, or it fails, in which case it is not tried again for a
            day.
    """
    if sys.platform != "linux":
        raise BuildError(f"they are built on Linux only. Received: {sys.platform}")
    if not _SOURCES:
        raise BuildError("their sources were not installed")
    flags = [*_OPTIONS, *tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    try:
        folder = cache_folder() / _key(flags)
    except RuntimeError as error:
        raise BuildError(f"there is no folder for them: {error}; set XDG_CACHE_HOME") from error
    library = folder / "kernels.so"
    try:
        if library.exists():
            return library
        command = _compiler()
        failed = folder / f"failed-{_digest([*command, *_version(command)])}.log"
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not library.exists() and not _is_recent(failed):
                info_once("compiling C++ kernels into %s, once on this machine", folder)
                _compile(command, flags, library, failed)
        if not library.exists():
            raise BuildError(f"{command[0]} has failed: see {failed}; remove it to try again")
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error}") from error
    return library


def cache_folder():
    """The folder of what is compiled: `keras_psplus` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "keras_psplus"
    )


def _compiler():
    """The command of the compiler, as a list."""
    try:
        wanted = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX cannot be read: {error}. Received: {os.environ['CXX']}") from error
    names = wanted[:1] or _COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(names)}): install g++, or set CXX")
    return [found, *wanted[1:]]


def _version(command):
    """Strings that change when the compiler is replaced."""
    file = os.stat(command[0])
    return str(file.st_size), str(file.st_mtime_ns)


def _key(flags):
    versions = tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION
    texts = [file.read_text() for file in (*_SOURCES, *_HEADERS)]
    return _digest([*flags, *versions, platform.machine(), *texts])


def _digest(parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_recent(log):
    return log.exists() and time.time() - log.stat().st_mtime < _FAILED_FOR


@contextlib.contextmanager
def _alone(folder):
    """Waits until no other process compiles there."""
    with open(folder / "lock", "w") as file:
        end = time.monotonic() + _TIMEOUT + 10
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BuildError(
                        f"another process has been compiling in {folder} for {_TIMEOUT + 10} s"
                    ) from None
                time.sleep(0.1)
        yield


def _compile(compiler, flags, library, failed):
    # Under a name of its own until it is whole.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = os.path.join(folder, library.name)
        command = [*compiler, *map(str, _SOURCES), "-o", made, *flags]
        # In a session of its own: compilers are several processes, which end together.
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=_TIMEOUT)
                good = process.returncode == 0
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                said, good = process.communicate()[0], False
                said += f"\nnot done after {_TIMEOUT} s".encode()
        if good:
            os.replace(made, library)
        else:
            failed.write_bytes(shlex.join(command).encode() + b"\n" + said)
