"""Starts a job again when a task of it has failed, a number of times."""

import time
from collections.abc import Callable

from keras_psplus.cluster.launcher.results import WRONG_COMMAND_LINE, ClusterResult
from keras_psplus.cluster.launcher.task_restarts import SHORT_SECONDS, pause_after
from keras_psplus.cluster.processes import LocalCluster


def run(
    make_cluster: Callable[[int], LocalCluster],
    max_restarts: int,
    timeout: float | None = None,
    log: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> ClusterResult:
    """Runs a job until it ends well or its restarts are used up.

    Every attempt is a new cluster. A job that fails soon after its start is started again after a
    pause, which doubles with each such failure in a row. One that was ended by a signal or its
    time-out, whose command line was wrong, or whose chief has ended well without the worker that
    failed, is not started again.

    Example:

    ```python
    result = restarts.run(
        lambda restart: LocalCluster(command, workers=2, log_dir=folder, restart=restart),
        max_restarts=3,
    )
    ```

    Args:
        make_cluster: Function of the number of restarts up to now that returns a `LocalCluster`.
        max_restarts: How often the job may be started again, at least 0.
        timeout: Seconds for all attempts together; None for no limit.
        log: Function that takes a line of progress.
        sleep: Function that waits for some seconds.

    Returns:
        The last attempt's `ClusterResult`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    restart = quick = 0
    while True:
        began = time.monotonic()
        with make_cluster(restart) as cluster:
            result = cluster.wait(None if deadline is None else max(0.0, deadline - began))
        # Of tasks that were started again by themselves, too.
        restart += result.task_restarts
        if not _can_be_restarted(result):
            return result
        if result.chief_has_ended_well:
            log(f"{result.first_failure} has failed, but the chief has ended well: no restart")
            return result
        failed = f"{result.first_failure} has failed ({result.how_it_failed})"
        if restart >= max_restarts:
            if max_restarts:
                log(f"{failed}; no restart of {max_restarts} is left")
            return result
        restart += 1
        quick = quick + 1 if time.monotonic() - began < SHORT_SECONDS else 0
        pause = pause_after(quick)
        if deadline is not None:
            pause = min(pause, max(0.0, deadline - time.monotonic()))
        log(f"{failed}; restart {restart} of {max_restarts} begins in {pause:g} s")
        sleep(pause)


def _can_be_restarted(result: ClusterResult) -> bool:
    return (
        result.first_failure is not None
        and result.signal is None
        and not result.timed_out
        and result.exit_code != WRONG_COMMAND_LINE
    )
