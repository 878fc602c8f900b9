"""Folders below which a parameter server writes, for any client."""

import os
import posixpath
import re
from collections.abc import Iterable

from keras_psplus.cluster.environment import TOKEN_VARIABLE

_STEM = re.compile(r"[\w.-]+")


class Folders:
    """The folders that a server was started for.

    Args:
        paths: Their paths, or URLs; None if it may write anywhere.
    """

    def __init__(self, paths: Iterable[str] | None) -> None:
        self._paths = None if paths is None else list(paths)

    def check_allowed(self, directory: str, stem: str = "none") -> None:
        """Sees that what is asked for would be written below one of them.

        Args:
            directory: The folder.
            stem: How the names of files in it begin.

        Raises:
            ValueError: If it would not.
        """
        wanted, paths = _real(directory), ["/"] if self._paths is None else self._paths
        is_below = self._paths is None or any(
            f"{wanted}/".startswith(f"{_real(path).rstrip('/')}/") for path in paths
        )
        if not is_below or not _STEM.fullmatch(stem):
            raise ValueError(
                f"it writes only below the folder that it was started for: {', '.join(paths)}. "
                "Give all tasks `tables_dir=`, the folder below which backups and `save_tables` "
                f"are to be written, or a secret {TOKEN_VARIABLE}. "
                f"Received: directory={directory!r}"
            )


def _real(path: str) -> str:
    if "://" not in path:
        return os.path.realpath(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{posixpath.normpath(rest)}"
