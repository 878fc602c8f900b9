"""Waiting for what jobs write into their logs."""

import pathlib
import time


def wait_for(path, text, seconds=60, process=None):
    """Waits until a file has a text; fails with the file's end after some seconds.

    With the id of a `process`, it fails as soon as that has ended.
    """
    deadline, is_over = time.monotonic() + seconds, False
    while time.monotonic() < deadline and not is_over:
        is_over = process is not None and _has_ended(process)
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.1)
    when = "before its process ended" if is_over else f"in {seconds} s"
    raise AssertionError(f"no {text!r} {when}:\n{path.read_text()[-4000:]}")


def _has_ended(process):
    """Whether a child is no more, or has ended and not been waited for."""
    stat = pathlib.Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for_one_of(paths, *texts, seconds=60):
    """Waits until one of some files has all texts; fails with the files' ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in paths:
            if path.exists() and all(text in path.read_text() for text in texts):
                return
        time.sleep(0.1)
    ends = "\n".join(path.read_text()[-3000:] for path in paths)
    raise AssertionError(f"not all of {texts} in one file in {seconds} s:\n{ends}")
