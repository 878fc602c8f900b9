"""Compiles the library's C++ kernels for the TensorFlow that is installed, once on a machine."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time

import tensorflow as tf

from keras_psplus.log import info_once

_SOURCES = tuple(sorted(pathlib.Path(__file__).parent.glob("*.cc")))
_COMPILERS = ("g++", "clang++", "c++")
# A product that is rounded together with a sum would not give TensorFlow's bits.
_OPTIONS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-w")
# Seconds: a compiler takes 10 to 30.
_TIMEOUT = 240


class BuildError(Exception):
    """There are no kernels; the message says why."""


def build():
    """Compiles the kernels, unless that has been done before.

    What is compiled is kept in the user's cache, under a name that depends on the kernels, the
    compiler and TensorFlow. Of several processes one compiles, and the others wait for it.

    Returns:
        Path of the shared library.

    Raises:
        BuildError: If there is no compiler, or it fails, in which case it is not tried again.
    """
    if sys.platform != "linux":
        raise BuildError(f"they are built on Linux only. Received: {sys.platform}")
    compiler = _compiler()
    flags = [*_OPTIONS, *tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    try:
        folder = cache_folder() / _key(compiler, flags)
    except RuntimeError as error:
        raise BuildError(f"there is no folder for them: {error}; set XDG_CACHE_HOME") from error
    library, failed = folder / "kernels.so", folder / "failed.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not library.exists() and not failed.exists():
                info_once("compiling C++ kernels into %s, once on this machine", folder)
                _compile(compiler, flags, library, failed)
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error}") from error
    if not library.exists():
        raise BuildError(f"{compiler} has failed: see {failed}; remove it to try again")
    return library


def cache_folder():
    """The folder of what is compiled: `keras_psplus` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "keras_psplus"
    )


def _compiler():
    wanted = os.environ.get("CXX", "").split()
    names = wanted[:1] or _COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(names)}): install g++, or set CXX")
    return found


def _key(compiler, flags):
    parts = [compiler, *flags, tf.__version__, platform.machine()]
    parts += [source.read_text() for source in _SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


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
                        f"another process has been compiling in {folder} for {_TIMEOUT} s"
                    ) from None
                time.sleep(0.1)
        yield


def _compile(compiler, flags, library, failed):
    # Under a name of its own until it is whole.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = os.path.join(folder, library.name)
        command = [compiler, *map(str, _SOURCES), "-o", made, *flags]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT,
            )
            said, good = done.stdout, done.returncode == 0
        except subprocess.TimeoutExpired as error:
            said, good = (error.stdout or b"") + f"\nnot done after {_TIMEOUT} s".encode(), False
        if good:
            os.replace(made, library)
        else:
            failed.write_bytes(" ".join(command).encode() + b"\n" + said)
