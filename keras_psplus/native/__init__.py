"""Kernels in C++ for what takes TensorFlow's own many passes over memory."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import pathlib
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import tensorflow as tf

from keras_psplus.log import info_once

# Compiles the library's C++ kernels for the TensorFlow that is installed, once on a machine.

# Cache of compiled libraries, and checks of those that may be loaded.
#
# A loaded library runs with all rights of this user. So a file is accepted only if nobody but this
# user, or root, can have written it, and if it is complete.

_FOLDER, _FILE = 0o700, 0o600
# A pipe would wait for its other end.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeError(OSError):
    """Somebody else could have written what would be loaded."""


class DamagedError(OSError):
    """A file is not what was written."""


def cache_folder() -> pathlib.Path:
    """The folder of what is compiled: `keras_psplus` in `$XDG_CACHE_HOME` or `~/.cache`."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # Its specification has these ignored.
        base = pathlib.Path.home() / ".cache"
    if not base.is_absolute():
        raise RuntimeError(f"HOME is no absolute path. Received: HOME={os.environ.get('HOME')}")
    return base / "keras_psplus"


class Folder:
    """A folder below `cache_folder()`, held open, so that it stays the one that was checked."""

    def __init__(self, path: pathlib.Path, make: bool = False) -> None:
        self._path = path
        root = path.parent
        _check_above(root.parent)
        if make:
            _make_above(root.parent)
        above = _open_folder(root, None, root, make)
        try:
            self._fd = _open_folder(path.name, above, path, make)
        finally:
            os.close(above)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def open(self, name: str) -> io.BufferedReader:
        """Opens a file to be read that only this user, or root, can have written."""
        path = self._path / name
        with _links_named(path):
            fd = os.open(name, _READ, dir_fd=self._fd)
        try:
            _check(os.fstat(fd), path, stat.S_ISREG)
            return os.fdopen(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def open_whole(self, name: str) -> io.BufferedReader:
        """Opens a file that `write_whole` has written, if it still is what it was.

        Raises:
            FileNotFoundError: If it is not there.
            UnsafeError: If it is a link, or others could have written it.
            DamagedError: If it is not what was written.
        """
        file = self.open(name)
        try:
            try:
                with self.open(_digest_name(name)) as digests:
                    wanted = digests.read(64)
            except FileNotFoundError:
                wanted = None
            if wanted != _digest(file):
                raise DamagedError(f"{self._path / name} is damaged, and is not used")
            return file
        except BaseException:
            file.close()
            raise

    def write_whole(self, name: str, data: bytes) -> None:
        """Writes a file for `open_whole`."""
        line = f"{hashlib.sha256(data).hexdigest()}  {name}\n"
        self.write(_digest_name(name), line.encode())
        self.write(name, data)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file that this user alone can read, whole or not at all."""
        new = f"{name}.new"
        self._remove(new)
        fd = os.open(new, _WRITE | os.O_EXCL, _FILE, dir_fd=self._fd)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, _FILE)
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._remove(new)
            raise

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    @contextlib.contextmanager
    def lock(self) -> Iterator[Callable[[], bool]]:
        """Opens a lock file; yields a function that tries to lock it.

        The function returns whether it could.
        """
        fd = os.open("lock", _WRITE, _FILE, dir_fd=self._fd)
        try:
            os.fchmod(fd, _FILE)

            def locked() -> bool:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            yield locked
        finally:
            os.close(fd)


def owners() -> set[int]:
    """Users whose files may be loaded: this one, and root."""
    return {os.geteuid(), 0}


def _check_above(path: pathlib.Path) -> None:
    """Raises UnsafeError if anybody may replace what is in one of the folders above."""
    path = pathlib.Path(os.path.realpath(path))
    for folder in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(folder).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise UnsafeError(_writable(folder, mode))


def _make_above(path: pathlib.Path) -> None:
    if not path.is_dir():
        _make_above(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, _FOLDER)
            os.chmod(path, _FOLDER)  # The umask may have taken some away.


def _open_folder(
    name: str | pathlib.Path, above: int | None, path: pathlib.Path, make: bool
) -> int:
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _FOLDER, dir_fd=above)
            os.chmod(name, _FOLDER, dir_fd=above)
    with _links_named(path):
        fd = os.open(name, _READ | os.O_DIRECTORY, dir_fd=above)
    try:
        _check(os.fstat(fd), path, stat.S_ISDIR)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _links_named(path: pathlib.Path) -> Iterator[None]:
    """Context that names a symbolic link in errors about loops or folders."""
    try:
        yield
    except OSError:
        if path.is_symlink():
            raise UnsafeError(f"{path} is a symbolic link") from None
        raise


def _check(status: os.stat_result, path: pathlib.Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode):
        raise UnsafeError(f"{path} is of another kind. Received: mode {oct(status.st_mode)}")
    if status.st_uid not in owners():
        raise UnsafeError(
            f"{path} belongs to another user; remove it, or set XDG_CACHE_HOME to a folder of "
            f"your own. Received: owner {status.st_uid} for user {os.geteuid()}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeError(_writable(path, status.st_mode))


def _writable(path: pathlib.Path, mode: int) -> str:
    return (
        f"others can write to {path}; remove what is not yours, then `chmod go-w` it. "
        f"Received: mode {oct(stat.S_IMODE(mode))}"
    )


def _digest(file: io.BufferedReader) -> bytes:
    digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
    file.seek(0)
    return digest


def _digest_name(name: str) -> str:
    return f"{name}.sha256"


_KERNELS = pathlib.Path(__file__).parent
_SOURCES, _HEADERS = sorted(_KERNELS.glob("*.cc")), sorted(_KERNELS.glob("*.h"))
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
        root, key = cache_folder(), _key(flags)
    except RuntimeError as error:
        raise BuildError(f"there is no folder for them: {error}; set XDG_CACHE_HOME") from error
    try:
        command = _compiler()
        own = root / f"{key}-{_digest_of([_version(*command)])}"
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
        root, key = cache_folder(), _key(flags)
        command = _compiler()
    except (RuntimeError, BuildError):
        return True
    folder = root / f"{key}-{_digest_of([_version(*command)])}"
    log = f"failed-{_digest_of([*command, *_identity(command)])}.log"
    return _is_safe_and_whole(folder) or _is_recent(folder / log)


def opened(library: pathlib.Path) -> int:
    """Opens a library that `build` has found, and checks again what was opened."""
    with Folder(library.parent) as folder, folder.open_whole(library.name) as file:
        return os.dup(file.fileno())


def _is_whole(folder: pathlib.Path) -> bool:
    try:
        os.close(opened(folder / _LIBRARY))
        return True
    except FileNotFoundError:
        return False
    except DamagedError as error:
        info_once("%s", error)
        return False


def _is_safe_and_whole(folder: pathlib.Path) -> bool:
    try:
        return _is_whole(folder)
    except OSError:
        return False


def _make(path: pathlib.Path, command: list[str], flags: list[str]) -> None:
    log = f"failed-{_digest_of([*command, *_identity(command)])}.log"
    with Folder(path, make=True) as folder, _alone(folder, path):
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
    file = os.stat(command[0])
    return str(file.st_size), str(file.st_mtime_ns)


@functools.cache
def _version(*command: str) -> str:
    try:
        return _run([*command, "--version"], _VERSION_TIMEOUT)[1].decode(errors="replace")
    except OSError:
        return ""


def _key(flags: list[str]) -> str:
    versions = tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION
    texts = [file.read_text() for file in (*_SOURCES, *_HEADERS)]
    return _digest_of([*flags, *versions, _libc(), platform.machine(), *texts])


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _digest_of(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_recent(log: pathlib.Path) -> bool:
    return log.exists() and time.time() - log.stat().st_mtime < _FAILED_FOR


@contextlib.contextmanager
def _alone(folder: Folder, path: pathlib.Path) -> Iterator[None]:
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


# Devices for which there are kernels: TensorFlow's own for GPUs, the library's for processors.


def has_gpus() -> bool:
    """Whether there are GPUs, for which some things are computed by other operations.

    On a GPU, TensorFlow keeps int32 tensors in the host's memory for many operations, such as
    reshaping and arithmetic, and some operations have no kernel at all.
    """
    return bool(tf.config.list_logical_devices("GPU"))


_VARIABLE = "KERAS_PSPLUS_NATIVE"
_loading = threading.Lock()


def kernels() -> ModuleType | None:
    """Loads the library's own kernels, which are compiled when this machine needs them first.

    They are for processors. `KERAS_PSPLUS_NATIVE=0` in the environment does without them.

    Returns:
        Module with a function for each kernel's operation; None if there are none, and TensorFlow's
        own kernels serve. It is logged if they could not be made.
    """
    if _unwanted():
        return None
    loaded, state = _loaded()
    if loaded is None:
        info_once("compressing by TensorFlow's own kernels, which are slower: %s", state)
    return loaded


def state(compiles: bool = True) -> str:
    """Describes in a line whether there are kernels."""
    reason = _unwanted()
    if reason:
        return f"not used: {reason}"
    if not compiles and not is_built():
        return "not compiled yet: the first step that needs them does it, in some ten seconds"
    return _loaded()[1]


def _unwanted() -> str | None:
    """Reason why kernels are not used at all, or None."""
    if os.environ.get(_VARIABLE) == "0":
        return f"{_VARIABLE}=0"
    return "there are GPUs" if has_gpus() else None


def _loaded() -> tuple[ModuleType | None, str]:
    # Of threads that ask at the same time, the second would get a module without its functions.
    with _loading:
        return _load()


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        path = build()
        # It stays open: TensorFlow would take another file under the same name for this one.
        return tf.load_op_library(f"/proc/self/fd/{opened(path)}"), f"compiled: {path}"
    except (BuildError, tf.errors.OpError, OSError) as reason:
        return None, f"none: {reason}"
