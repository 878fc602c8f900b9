"""Runs a script in a cluster of real processes, for tests, with a time limit."""

import inspect
import os
import pathlib
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.launcher.task_ends import ClusterResult
from keras_psplus.cluster.processes import LocalCluster


def run_in_processes(
    script: str | os.PathLike[str] | Callable[[], Any],
    workers: int = 2,
    chief: bool = False,
    ps: int = 0,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    args: Iterable[Any] = (),
    expect_failure: bool = False,
    tail_lines: int = 60,
    failure_grace: float = 5.0,
) -> ClusterResult:
    """Runs Python code in every task of a local cluster and waits for them.

    Example:

    ```python
    def train():
        import tensorflow as tf
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        print("replicas:", strategy.num_replicas_in_sync)

    def test_two_workers_train():
        result = run_in_processes(train, workers=2, timeout=60)
        assert "replicas: 2" in result.logs["worker-1"]
    ```

    Args:
        script: Path of a script; or source code (a string of several lines);
            or a function without arguments, closures and decorators, whose
            source is run: it sees nothing of its module.
        workers: Number of workers.
        chief: Whether there is a chief beside the workers.
        ps: Number of parameter servers.
        timeout: Seconds after which every process is killed.
        env: Dict of further environment variables.
        args: Arguments of the script.
        expect_failure: Whether a task has to fail.
        tail_lines: How many lines of each log go into the error message.
        failure_grace: Seconds that the other tasks have after a failure.

    Returns:
        A `ClusterResult`: `exit_codes` and `logs` by task name.

    Raises:
        AssertionError: If a task fails (or, under `expect_failure`, none
            does) or the time limit strikes. The message holds the logs.
    """
    with tempfile.TemporaryDirectory(prefix="keras_psplus_test_") as folder:
        path = _as_file(script, pathlib.Path(folder))
        cluster = LocalCluster(
            [sys.executable, path, *map(str, args)],
            workers=workers,
            ps=ps,
            chief=chief,
            env={**(env or {}), "PYTHONPATH": python_path({**os.environ, **(env or {})})},
            log_dir=folder,
            failure_grace=failure_grace,
            kill_grace=1.0,
        )
        with cluster:
            result = cluster.wait(timeout)
        assert result.logs is not None  # read before the folder goes
    _check(result, timeout, expect_failure, tail_lines)
    return result


def _check(result: ClusterResult, timeout: float, expect_failure: bool, tail_lines: int) -> None:
    if result.timed_out:
        problem = f"The processes did not end within {timeout:g} s"
    elif result.exit_code and not expect_failure:
        problem = f"{result.first_failure or 'The cluster'} failed"
    elif not result.exit_code and expect_failure:
        problem = "No process failed, but one should have"
    else:
        return
    endings = ", ".join(f"{name}: {result.how_ended(name)}" for name in result.log_paths)
    raise AssertionError(f"{problem} ({endings}).\n{result.tails(tail_lines)}")


def _as_file(
    script: Callable[[], object] | str | os.PathLike[str], folder: pathlib.Path
) -> pathlib.Path:
    if inspect.isfunction(script):
        source = f"{textwrap.dedent(inspect.getsource(script))}\n\n{script.__name__}()\n"
    elif isinstance(script, str) and "\n" in script:
        source = textwrap.dedent(script)
    else:
        assert not callable(script)
        path = pathlib.Path(script)
        if not path.is_file():
            raise FileNotFoundError(f"There is no script {str(path)!r}. Received: {script!r}")
        return path.resolve()
    path = folder / "script.py"
    path.write_text(source, encoding="utf-8")
    return path
