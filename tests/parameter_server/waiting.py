"""Waiting for what a job writes into its log."""

import time


def wait_for(path, text, seconds=60):
    """Waits until a file has a text; fails with the file's end after some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"no {text!r} in {seconds} s:\n{path.read_text()[-4000:]}")
