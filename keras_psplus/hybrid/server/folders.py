"""Folders below which a parameter server writes, for any client."""

import os
import posixpath
import re
from collections.abc import Iterable

_STEM = re.compile(r"[\w.-]+")


class Folders:
    """The folders that a server was started for.

    Args:
        paths: Their paths, or URLs.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = list(paths)

    def check_allowed(self, directory: str, stem: str = "none") -> None:
        """Sees that what is asked for would be written below one of them.

        Args:
            directory: The folder.
            stem: How the names of files in it begin.

        Raises:
            ValueError: If it would not.
        """
        wanted = _real(directory)
        is_below = any(f"{wanted}/".startswith(f"{_real(p).rstrip('/')}/") for p in self._paths)
        if not is_below or not _STEM.fullmatch(stem):
            raise ValueError(
                "it writes only below the folders that it was started for: "
                f"{', '.join(self._paths)}. Give all tasks `tables_dir=`, the folder below which "
                f"`save_tables` is to write. Received: directory={directory!r}"
            )


def _real(path):
    if "://" not in path:
        return os.path.realpath(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{posixpath.normpath(rest)}"
