"""Compiles the library's C++ kernels for the TensorFlow that is installed, once on a machine."""

import contextlib
import functools
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
from collections.abc import Iterable, Iterator

import tensorflow as tf

from keras_psplus.log import info_once
from keras_psplus.native import cache

_FOLDER = pathlib.Path(__file__).parent
_SOURCES, _HEADERS = sorted(_FOLDER.glob("*.cc")), sorted(_FOLDER.glob("*.h"))
_COMPILERS = ("g++", "clang++", "c++")
# A product that is rounded together with a sum would not give TensorFlow's bits.
_OPTIONS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-w")
_LIBRARY = "kernels.so"
# Seconds: a compiler takes 10 to 30.
_TIMEOUT, _VERSION_TIMEOUT = 240, 10
# Seconds after which a compiler that has failed is tried again: a disk may have been full.
_FAILED_FOR = 24 * 3600


class BuildError(Exception):
    """There are no kernels; the message says why."""


def build() -> pathlib.Path:
    """Compiles the kernels, unless that has been done before.

    What is compiled is kept in the user's cache, under a name that depends on the kernels, on
    TensorFlow, on the C library and on the compiler. Of several processes one compiles, and the
    others wait for it. Who finds it there needs no compiler, and need not be allowed to write. A
    library that is damaged is compiled again; one that others could have written is not used.

    Returns:
        Path of the shared library; see `opened`.

    Raises:
        BuildError: If there is no compiler, or it fails, in which case it is not tried again for a
            day; or if the cache cannot be used.
    """
    if sys.platform != "linux":
        raise BuildError(f"they are built on Linux only. Received: {sys.platform}")
    if not _SOURCES:
        raise BuildError("their sources were not installed")
    flags = [*_OPTIONS, *tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    try:
        root, key = cache.cache_folder(), _key(flags)
    except RuntimeError as error:
        raise BuildError(f"there is no folder for them: {error}; set XDG_CACHE_HOME") from error
    try:
        command = _compiler()
        own = root / f"{key}-{_digest([_version(*command)])}"
        folder: pathlib.Path | None = own
        try:
            if not _is_whole(own):
                _make(own, command, flags)
        except OSError as error:
            raise BuildError(f"{own} cannot be used: {error}") from error
    except BuildError as error:
        found = filter(_is_safe_and_whole, sorted(root.glob(f"{key}-*")))
        folder = next(found, None)
        if folder is None:
            raise
        info_once("using C++ kernels of another compiler, in %s: %s", folder, error)
    assert folder is not None
    return folder / _LIBRARY


def is_built() -> bool:
    """Whether `build` has nothing to compile: the kernels are there, or none can be made."""
    if sys.platform != "linux" or not _SOURCES:
        return True
    flags = [*_OPTIONS, *tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    try:
        root, key = cache.cache_folder(), _key(flags)
        command = _compiler()
    except (RuntimeError, BuildError):
        return True
    folder = root / f"{key}-{_digest([_version(*command)])}"
    log = f"failed-{_digest([*command, *_identity(command)])}.log"
    return _is_safe_and_whole(folder) or _is_recent(folder / log)


def opened(library: pathlib.Path) -> int:
    """Opens a library that `build` has found, and checks again what was opened.

    Returns:
        Descriptor of the open file.

    Raises:
        OSError: If it is not there, damaged, or others could have written it.
    """
    with cache.Folder(library.parent) as folder, folder.open_whole(library.name) as file:
        return os.dup(file.fileno())


def _is_whole(folder: pathlib.Path) -> bool:
    """Whether a folder has a library; it is said if it is damaged."""
    try:
        os.close(opened(folder / _LIBRARY))
        return True
    except FileNotFoundError:
        return False
    except cache.DamagedError as error:
        info_once("%s", error)
        return False


def _is_safe_and_whole(folder: pathlib.Path) -> bool:
    try:
        return _is_whole(folder)
    except OSError:
        return False


def _make(path: pathlib.Path, command: list[str], flags: list[str]) -> None:
    log = f"failed-{_digest([*command, *_identity(command)])}.log"
    with cache.Folder(path, make=True) as folder, _alone(folder, path):
        if not _is_whole(path) and not _is_recent(path / log):
            info_once(
                "compiling C++ kernels into %s, once on this machine: the step that needs them "
                "waits, for some ten seconds",
                path,
            )
            start = time.monotonic()
            made, said = _compile(command, flags)
            if made is None:
                folder.write(log, said)
            else:
                folder.write_whole(_LIBRARY, made)
                info_once("compiled them in %.0f s", time.monotonic() - start)
        if not _is_whole(path):
            raise BuildError(f"{command[0]} has failed: see {path / log}; remove it to try again")


def _compiler() -> list[str]:
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


def _identity(command: list[str]) -> tuple[str, str]:
    """Strings that change when the compiler is replaced."""
    file = os.stat(command[0])
    return str(file.st_size), str(file.st_mtime_ns)


@functools.cache
def _version(*command: str) -> str:
    """Version text of a compiler."""
    try:
        return _run([*command, "--version"], _VERSION_TIMEOUT)[1].decode(errors="replace")
    except OSError:
        return ""


def _key(flags: list[str]) -> str:
    versions = tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION
    texts = [file.read_text() for file in (*_SOURCES, *_HEADERS)]
    return _digest([*flags, *versions, _libc(), platform.machine(), *texts])


def _libc() -> str:
    """Name and version of the C library."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_recent(log: pathlib.Path) -> bool:
    return log.exists() and time.time() - log.stat().st_mtime < _FAILED_FOR


@contextlib.contextmanager
def _alone(folder: cache.Folder, path: pathlib.Path) -> Iterator[None]:
    """Waits until no other process compiles there."""
    with folder.lock() as locked:
        end = time.monotonic() + _TIMEOUT + 10
        while not locked():
            info_once("waiting for another process, which compiles C++ kernels into %s", path)
            if time.monotonic() > end:
                raise BuildError(
                    f"another process has been compiling in {path} for {_TIMEOUT + 10} s"
                )
            time.sleep(0.1)
        yield


def _compile(compiler: list[str], flags: list[str]) -> tuple[bytes | None, bytes]:
    """Compiles the library; returns its bytes or None, and the compiler's messages."""
    with tempfile.TemporaryDirectory(prefix="keras_psplus_") as folder:
        os.chmod(folder, 0o700)  # The umask may have taken some away.
        made = pathlib.Path(folder, _LIBRARY)
        command = [*compiler, *map(str, _SOURCES), "-o", str(made), *flags]
        good, said = _run(command, _TIMEOUT)
        if good:
            return made.read_bytes(), said
        return None, shlex.join(command).encode() + b"\n" + said


def _run(command: list[str], timeout: float) -> tuple[bool, bytes]:
    """Returns whether a program ends well, and what it says."""
    # In its own session: compilers are several processes, which end together.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        umask=0o077,
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout)
            return process.returncode == 0, said
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said, _ = process.communicate()
            return False, said + f"\nnot done after {timeout} s".encode()
