"""Waiting for processes that are not one's own children to be gone."""

import os
import time


def wait_for_end(pid, seconds=20):
    """Waits until there is no such process; fails after some seconds."""
    deadline = time.monotonic() + seconds
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
