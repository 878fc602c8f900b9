"""Files opened for reading, if they are regular files.

A FIFO would block its reader without end.
"""

import errno
import os
import stat

import tensorflow as tf

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: str | os.PathLike[str]) -> None:
    """Checks that a path, if there is something, is no FIFO, socket, device or folder.

    Raises:
        OSError: If it is.
    """
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
