"""Handshake between the leading task and the lab, by files in a folder.

The leader requests a rate of the links, and continues when the lab has set it. Training waits
meanwhile.
"""

import pathlib
import time

_POLL_SECONDS = 0.01


def ready(folder, rank):
    """Says that a task's training has begun."""
    pathlib.Path(folder, f"ready-{rank}").touch()


def wait_until_ready(folder, ranks, timeout):
    """Waits until all these tasks' trainings have begun.

    Raises:
        TimeoutError: If that takes longer than `timeout` seconds.
    """
    files = [pathlib.Path(folder, f"ready-{rank}") for rank in ranks]
    _wait(lambda: all(file.exists() for file in files), timeout, f"tasks {ranks} to begin")


def ask(folder, number, rate, timeout):
    """Asks for a rate, and waits until the links have it.

    Args:
        folder: The lab's.
        number: How many times this task has asked before.
        rate: As of `wire.parse_rate`.
        timeout: Seconds.

    Raises:
        TimeoutError: If there is no answer.
    """
    request = pathlib.Path(folder, f"ask-{number}")
    complete = request.with_suffix(".part")
    complete.write_text(rate)
    complete.rename(request)
    answer = pathlib.Path(folder, f"set-{number}")
    _wait(answer.exists, timeout, f"the rate {rate}")


def answer(folder, number, set_rate):
    """Sets the rate that the leader has asked for as its `number`-th, if it has.

    Returns:
        Whether it has.
    """
    request = pathlib.Path(folder, f"ask-{number}")
    if not request.exists():
        return False
    set_rate(request.read_text())
    pathlib.Path(folder, f"set-{number}").touch()
    return True


def say_done(folder):
    """Marks the leader's figures as complete; the lab need not wait for the job."""
    pathlib.Path(folder, "done").touch()


def is_done(folder):
    """Whether the leader has said so."""
    return pathlib.Path(folder, "done").exists()


def _wait(condition, timeout, what):
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"Waited for {what}. Received: nothing for {timeout:g} s")
        time.sleep(_POLL_SECONDS)
