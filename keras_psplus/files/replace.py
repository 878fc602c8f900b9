"""Small files that appear whole or not at all, without TensorFlow on a local disk."""

import contextlib
import os
import uuid


def replace(path: str | os.PathLike[str], content: bytes, is_durable: bool = True) -> None:
    """Writes a file in the place of another; readers see one of both, whole.

    Args:
        is_durable: Whether the disk has it when this returns.
    """
    path = os.fspath(path)
    folder, name = os.path.split(path)
    # Several processes may write it at once.
    own = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    if "://" in path:
        import tensorflow as tf

        with tf.io.gfile.GFile(own, "wb") as remote:
            remote.write(content)
        tf.io.gfile.rename(own, path, overwrite=True)
        return
    try:
        with open(own, "wb") as file:
            file.write(content)
        if is_durable:
            sync(own)
        os.replace(own, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(own)
        raise
    if is_durable:
        sync(folder)


def sync(path: str) -> None:
    """Waits until the disk has a file, or a folder's list of files."""
    if "://" in path:
        return  # Other file systems have it once the file is closed.
    handle = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
