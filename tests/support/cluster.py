"""Clusters that stay up and run cases, and the one process that these are held against.

A case is a function of a module of tests that trains, evaluates or reads, in the strategy's scope,
and returns a dict of arrays, or a model (whose weights are added) and a dict. It imports what it
needs, so that plain Keras runs it without the library:

```python
def adam(rows=40):
    model = mlp(keras.optimizers.Adam(0.01))
    return model, fit(model, *blobs(rows))


def test_adam():
    equals_one_process("ar2", adam, rows=41)


def test_bytes():
    found = run("ar2", sent_by_adam)  # Results by task
    assert found["worker-0"]["bytes"] == found["worker-1"]["bytes"]
    assert "2 workers" in found.logs["worker-0"]
```

The first case of a layout (see `layouts.py`) starts its cluster; later ones cost what they train.
A case that is decorated with `makes_scope` is run outside of the scope, and is given the function
that makes one.

`tf.distribute.get_strategy()` is the strategy, of which a process has one: a case that needs other
options swaps its parts and puts them back. A case with a parameter `strategy` is given it (None in
plain Keras), and is not in its scope. What a case changes for good (it kills, hangs, or reads
what is only set at the start) makes it one for a job of its own.

A case that fails alike on all tasks leaves the cluster as it is; where tasks differ, one ends or is
silent for too long, all are ended, and the next case starts a new cluster. Every case is checked
for more than its test asks: all workers end with the same bits, and nothing in the tasks' output
tells of an error.
"""

import collections
import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from unittest import mock

import numpy as np

from tests.support import jobs
from tests.support.layouts import LAYOUTS
from tests.support.results import assert_close

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WORKER = pathlib.Path(__file__).with_name("worker.py")
# More at once take too much memory.
_MOST_PROCESSES = 10
_START_SECONDS = 180
_clusters = {}
_references = {}


def makes_scope(case):
    """Marks a case that enters the strategy's scope itself, as scripts do."""
    case.makes_scope = True
    return case


def strategy_of(scope):
    """The strategy whose scope a function makes."""
    import tensorflow as tf

    with scope():
        return tf.distribute.get_strategy()


class Results(dict):
    """The arrays that each task has returned, by task.

    Attributes:
        logs: What each task has printed meanwhile, servers too.
    """

    def __init__(self, arrays, logs):
        super().__init__(arrays)
        self.logs = logs

    @property
    def first(self):
        """The arrays of the first task."""
        return next(iter(self.values()))


def run(layout, case, *, same=True, may_show_errors=False, seconds=120, **args):
    """Runs a case in the tasks of a layout.

    Args:
        layout: A name of `layouts.LAYOUTS`.
        case: The function.
        same: Whether all tasks must return the same bits, but for names that begin with `own`.
        may_show_errors: Whether the tasks' output may show tracebacks.
        seconds: How long the case may take.
        **args: The function's arguments, of types that JSON has.

    Returns:
        The `Results`.
    """
    cluster = _clusters.pop(layout, None)
    if cluster is None or cluster.is_used_up:
        if cluster is not None:
            cluster.end()
        while sum(LAYOUTS[name].processes for name in (layout, *_clusters)) > _MOST_PROCESSES:
            _clusters.pop(next(iter(_clusters))).end()
        cluster = _Cluster(layout)
    _clusters[layout] = cluster  # The one used last is the last to go.
    try:
        results = cluster.run(case, args, seconds)
    except _Ended as error:
        del _clusters[layout]
        raise AssertionError(str(error)) from None
    if not may_show_errors:
        for log in results.logs.values():
            jobs.check_output(log)
    if same:
        for task, arrays in results.items():
            assert arrays.keys() == results.first.keys(), f"{task} differs in names"
            for name in [name for name in arrays if not name.startswith("own")]:
                np.testing.assert_array_equal(
                    arrays[name], results.first[name], err_msg=f"{task} differs in {name}"
                )
    return results


def equals_one_process(layout, case, tolerance=2e-5, alone="plain", **args):
    """Checks that a case leaves in all tasks what plain Keras leaves in one process.

    Args:
        layout: A name of `layouts.LAYOUTS`.
        case: The function.
        tolerance: Relative and absolute, of each value.
        alone: The layout of the one process, if it is not that of plain Keras.
        **args: The function's arguments.

    Returns:
        The `Results` of the cluster.
    """
    expected = reference(case, alone, **args)
    results = run(layout, case, **args)
    assert_close(results.first, expected, tolerance)
    return results


def reference(case, alone="plain", **args):
    """Returns the arrays that a case leaves in plain Keras: run once for all processes of pytest.

    Args:
        case: The function.
        alone: The layout of the one process, if it is not that of plain Keras.
        **args: Its arguments.
    """
    key = f"{_module(case)}:{case.__qualname__}:{alone}:"
    key += json.dumps(args, sort_keys=True, default=str)
    if key not in _references:
        path = _shared() / f"{hashlib.sha256(key.encode()).hexdigest()}.npz"
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                np.savez(path.with_suffix(".new.npz"), **run(alone, case, **args).first)
                path.with_suffix(".new.npz").rename(path)
        with np.load(path) as arrays:
            _references[key] = dict(arrays)
    return _references[key]


def end_all():
    """Ends the clusters of this process, and says which did not end well."""
    problems = []
    while _clusters:
        name, cluster = _clusters.popitem()
        try:
            cluster.end()
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return problems


class _Ended(Exception):
    """A cluster had to be ended."""


class _Cluster:
    """The tasks of a layout."""

    def __init__(self, layout):
        self.layout, self.cases = layout, []
        self._folder = tempfile.TemporaryDirectory(prefix="cluster_")
        self._open = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self._kill()
            raise

    @property
    def is_used_up(self):
        return len(self.cases) >= LAYOUTS[self.layout].most_cases

    def _start(self):
        from keras_psplus.cluster.processes import LocalCluster
        from tests import warm

        folder, layout = pathlib.Path(self._folder.name), LAYOUTS[self.layout]
        path = str(folder / "socket")
        listening = self._open.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        listening.listen()
        listening.settimeout(1)
        command = [sys.executable, str(_WORKER), self.layout, path]
        env = {"PYTHONPATH": jobs.environment()["PYTHONPATH"], "TF_CPP_MIN_LOG_LEVEL": "2"}
        env["CUDA_VISIBLE_DEVICES"] = ""
        self._cluster = self._process = None
        with mock.patch.object(subprocess, "Popen", warm.Popen):
            if layout.workers:
                self._cluster = LocalCluster(
                    command,
                    workers=layout.workers,
                    ps=layout.ps,
                    chief=layout.chief,
                    env=env,
                    log_dir=folder,
                    kill_grace=1.0,
                )
                with _keeping_signals():
                    self._cluster.start()
                names = [task.name for task in self._cluster.tasks]
                self._logs = {name: self._cluster.log_path(name) for name in names}
            else:
                self._logs = {"process": folder / "process.log"}
                log = self._open.enter_context(open(self._logs["process"], "wb"))
                self._process = subprocess.Popen(
                    command, env=jobs.environment(**env), stdout=log, stderr=log
                )
        self._streams = self._accept(listening, layout.tasks)
        self._begins = dict.fromkeys(self._logs, 0)

    def _accept(self, listening, tasks):
        deadline = time.monotonic() + _START_SECONDS
        streams = {}
        while len(streams) < len(tasks):
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                ended = [pid for pid in self.pids if not _runs(pid)]
                assert not ended and time.monotonic() < deadline, self._shown("has not started")
                continue
            stream = _Stream(connection)
            self._open.callback(connection.close)
            streams[stream.read(deadline)["task"]] = stream
        return {task: streams[task] for task in tasks}

    @property
    def pids(self):
        """Ids of the processes."""
        if self._cluster is not None:
            return list(self._cluster.pids.values())
        return [self._process.pid] if self._process is not None else []

    def run(self, case, args, seconds):
        """Runs a case, and returns its `Results`."""
        self._begins = {task: path.stat().st_size for task, path in self._logs.items()}
        file = pathlib.Path(self._folder.name) / f"{len(self.cases)}.{{task}}.npz"
        request = {"module": _module(case), "case": case.__qualname__, "args": args}
        self.cases.append(case.__qualname__)
        for stream in self._streams.values():
            stream.write(request | {"file": str(file)})
        deadline, answers = time.monotonic() + seconds, {}
        for task, stream in self._streams.items():
            try:
                answers[task] = stream.read(deadline)
            except (EOFError, TimeoutError, ConnectionError) as error:
                self._end_badly(f"{task}: {type(error).__name__}")
        errors = {task: answer["error"] for task, answer in answers.items() if answer["error"]}
        if any(answer["lost"] for answer in answers.values()):
            self._end_badly(f"The job is lost: {answers}")
        kinds = collections.Counter(error.splitlines()[-1] for error in errors.values())
        if errors and (len(errors) < len(answers) or len(kinds) > 1):
            self._end_badly("Tasks differ in how the case ended.", errors)
        assert not errors, self._shown("The case failed on all tasks.", errors)
        arrays = {}
        for task in self._streams:
            path = str(file).format(task=task)
            with np.load(path) as found:
                arrays[task] = dict(found)
            os.remove(path)
        return Results(arrays, self._slices())

    def _slices(self):
        slices = {}
        for task, path in self._logs.items():
            with open(path, "rb") as file:
                file.seek(self._begins[task])
                slices[task] = file.read().decode(errors="replace")
        return slices

    def _shown(self, problem, errors=None):
        """A failure's message: the case, those before it in this cluster, and all logs."""
        self._begins = getattr(self, "_begins", dict.fromkeys(self._logs, 0))
        lines = [f"{problem} Layout {self.layout}, case {len(self.cases)} of its cluster, after:"]
        lines += [", ".join(self.cases[:-1]) or "none"]
        lines += [f"--- {task}\n{error}" for task, error in (errors or {}).items()]
        for task, text in self._slices().items():
            lines.append(f"--- log of {task}\n{text[-6000:]}")
        return "\n".join(lines)

    def _end_badly(self, problem, errors=None):
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # Their logs then show where each thread is.
        time.sleep(1)
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            problem += f", exit code {code}."
        message = self._shown(problem, errors)
        self._kill()
        raise _Ended(message)

    def end(self):
        """Ends the tasks, and fails unless they end well."""
        for stream in self._streams.values():
            stream.close()
        self._begins = {task: path.stat().st_size for task, path in self._logs.items()}
        try:
            if self._cluster is not None:
                result = self._cluster.wait(60)
                assert not result.timed_out and not result.exit_code, self._shown("No good end.")
            else:
                assert self._process.wait(60) == 0, self._shown("No good end.")
            for log in self._slices().values():
                jobs.check_output(log)
        finally:
            self._kill()

    def _kill(self):
        if self._cluster is not None:
            self._cluster.stop()
        elif self._process is not None:
            self._process.kill()
            self._process.wait()
        self._open.close()
        self._folder.cleanup()


@contextlib.contextmanager
def _keeping_signals():
    """Context after which signals do what they did: clusters stay up while other tests run."""
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


class _Stream:
    """Lines of JSON to and from a task, by a deadline."""

    def __init__(self, connection):
        self._connection, self._rest = connection, b""

    def write(self, what):
        self._connection.sendall(json.dumps(what, default=str).encode() + b"\n")

    def read(self, deadline):
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if not select.select([self._connection], [], [], max(0.0, left))[0]:
                raise TimeoutError
            received = self._connection.recv(1 << 16)
            if not received:
                raise EOFError
            self._rest += received
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def close(self):
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _module(case):
    """The name by which a task imports a case's module, whatever pytest calls it."""
    path = pathlib.Path(inspect.getfile(case)).resolve().relative_to(_ROOT)
    return ".".join(path.with_suffix("").parts)


def _shared():
    """A folder of all processes of this run of pytest."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = pathlib.Path(tempfile.gettempdir()) / f"keras_psplus_references_{run}"
    folder.mkdir(exist_ok=True)
    return folder


def _runs(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
