"""Waiting for processes that are not one's own children to be gone."""

import pathlib

from tests.support.jobs import wait_for


def wait_for_end(pid, seconds=20):
    """Waits until there is no such process; fails after some seconds."""
    wait_for(lambda: not _runs(pid), seconds, f"the end of process {pid}")


def _runs(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie that nobody has reaped yet has ended.
    return stat.rpartition(")")[2].split()[0] != "Z"
