"""Cache of compiled libraries, and checks of those that may be loaded.

A loaded library runs with all rights of this user. So a file is accepted only if nobody but this
user, or root, can have written it, and if it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import pathlib
import stat
from collections.abc import Callable, Iterator

_FOLDER, _FILE = 0o700, 0o600
# A pipe would wait for its other end.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeError(OSError):
    """Somebody else could have written what would be loaded."""


class DamagedError(OSError):
    """A file is not what was written."""


def cache_folder() -> pathlib.Path:
    """The folder of what is compiled: `keras_psplus` in `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        RuntimeError: If there is no home.
    """
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # Its specification has these ignored.
        base = pathlib.Path.home() / ".cache"
    if not base.is_absolute():
        raise RuntimeError(f"HOME is no absolute path. Received: HOME={os.environ.get('HOME')}")
    return base / "keras_psplus"


class Folder:
    """A folder below `cache_folder()`, held open, so that it stays the one that was checked.

    Args:
        path: Its path, a `pathlib.Path`, directly below `cache_folder()`.
        make: Whether it is made if it is not there.

    Raises:
        FileNotFoundError: If it is not there.
        UnsafeError: If others could write to it, or replace it.
    """

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
        """Opens a file to be read that only this user, or root, can have written.

        Raises:
            FileNotFoundError: If it is not there.
            UnsafeError: If it is a link, or others could have written it.
        """
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
