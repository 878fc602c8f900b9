"""Final report of `run` about a job that has failed."""

import contextlib
import pathlib
import sys

from keras_psplus.cluster.launcher.results import ClusterResult
from keras_psplus.cluster.output.log_filter import NoiseFilter

_TRACEBACK = "Traceback (most recent call last)"
LAST_LINES = 80


def show(result: ClusterResult, log_dir: pathlib.Path, timeout: float) -> None:
    """Writes how a job has ended to stderr, the first failure's cause last.

    Args:
        result: The last attempt's `ClusterResult`.
        log_dir: Folder of the tasks' logs.
        timeout: Seconds that the job had.
    """
    if result.exit_code == 0 and not result.terminated:
        return
    say = [f"{name}: {result.how_ended(name)}" for name in result.log_paths]
    if result.timed_out:
        say.append(f"ended after the time-out of {timeout:g} s")
    if result.signal is not None:
        say.append(f"ended by signal {result.signal}")
    say.append(f"logs: {log_dir}")
    if result.first_failure is not None:
        say += ["", f"{result.first_failure} failed first:", *_last_words(result)]
    with contextlib.suppress(OSError):  # nobody reads it, and the exit code is the job's
        print("\n".join(["", *say]), file=sys.stderr, flush=True)


def _last_words(result: ClusterResult) -> list[str]:
    """The first failure's last traceback, or the end of its log."""
    assert result.first_failure is not None
    lines = result.logs[result.first_failure].splitlines()
    is_noise = NoiseFilter().is_noise
    traceback = [line for line in last_traceback(lines) if not is_noise(line)]
    return traceback[-LAST_LINES:] or lines[-20:]


def last_traceback(lines: list[str]) -> list[str]:
    """The lines from the beginning of the last traceback on; none if there is none."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    return lines[starts[-1] :] if starts else []
