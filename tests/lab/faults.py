"""Faults that are put into a local cluster, at the steps for which they were planned."""

import contextlib
import dataclasses
import functools
import pathlib
import random
import re
import shutil
import signal
import socket
import tempfile
import threading
import time

from keras_psplus.cluster.monitor.progress import OBSERVER_VARIABLE

KINDS = {
    "kill": (),
    "preempt": (),
    "stop": ("for",),
    "slow": ("factor", "for"),
    "cut": ("for",),
    "delay": ("ms", "for"),
}
GRAMMAR = """faults are KIND:TASK@step=N, separated by ';'
  kill:worker1@step=20                      killed by SIGKILL
  preempt:worker1@step=20                   told to end by SIGTERM, as by a scheduler
  stop:ps0@step=10,for=5                    stopped for 5 s; without `for`, for good
  slow:worker1@step=5,factor=5,for=20       5 times as slow for 20 s
  cut:worker1@step=20,for=5                 cut off from all others for 5 s (*)
  delay:ps0@step=20,ms=50,for=10            all that it sends takes 50 ms more for 10 s (*)
  kill:random@seed=3,within=100             a task and a step, at most 100, drawn by the seed
TASK is chief, worker0, worker1, ps0, ...; N counts the chief's (or worker 0's) training steps.
(*) needs Linux, root, iproute2 and util-linux: each task gets its own network namespace."""
_EVENT = re.compile(r"(\w+):([\w-]+)@(.*)", re.DOTALL)
_DEFAULT_WITHIN = 100
_SLICE_SECONDS = 0.02
_CALL_SECONDS = 5.0
_OF_LINKS = ("cut", "delay")


@dataclasses.dataclass(frozen=True)
class Event:
    """One fault.

    Args:
        kind: One of `KINDS`.
        task: Name of the task, e.g. `"worker-1"`.
        step: Number of the training step after which it comes.
        seconds: How long it lasts; None for good.
        factor: Of `slow`, how many times as slow.
        ms: Of `delay`, milliseconds.
        seed: What task and step were drawn by, or None.
    """

    kind: str
    task: str
    step: int
    seconds: float | None = None
    factor: float | None = None
    ms: float | None = None
    seed: int | None = None

    def __str__(self):
        words = [f"step={self.step}"]
        for name, value in (("factor", self.factor), ("ms", self.ms), ("for", self.seconds)):
            words += [] if value is None else [f"{name}={value:g}"]
        return f"{self.kind}:{self.task.replace('-', '')}@{','.join(words)}"


class LinkFaults:
    """Overlapping faults of the links of a cluster's tasks.

    Delays add up, and a link is up when no cut is left.

    Args:
        network: `netlab.Lab`.
        tasks: Names of the tasks, in the order of the network's hosts.
    """

    def __init__(self, network, tasks):
        self._network, self._ranks = network, {name: rank for rank, name in enumerate(tasks)}
        self._present = []
        self._lock = threading.Lock()

    def begin(self, event):
        """Does an event to its task's link."""
        with self._lock:
            self._present.append(event)
            self._apply(event)

    def end(self, event):
        """Takes it back."""
        with self._lock:
            self._present.remove(event)
            self._apply(event)

    def _apply(self, changed):
        rank = self._ranks[changed.task]
        same = [e for e in self._present if (e.task, e.kind) == (changed.task, changed.kind)]
        if changed.kind == "cut":
            self._network.set_link(rank, up=not same)
        else:
            self._network.set_delay(rank, sum(event.ms for event in same) / 1e3)


class Injector:
    """The faults of one job; each comes once, however often the job is started.

    The chief (or worker 0) calls after each step and waits until what is planned for it is done, so
    that it comes at the same step every time.

    Example:

    ```python
    events = parse("kill:worker1@step=20", ["worker-0", "worker-1"])
    with Injector(events, print) as faults:
        with LocalCluster(command, workers=2, env=faults.environment) as cluster:
            faults.watch(cluster)
            cluster.wait()
    ```

    Args:
        log: Function that takes a line of progress.

    Attributes:
        needs_network: Whether the cluster has to have a `netlab.Lab`.
    """

    def __init__(self, events, log):
        self._left, self._log = list(events), log
        self.needs_network = any(event.kind in _OF_LINKS for event in events)
        self._cluster = self._links = None
        self._ended = threading.Event()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="faults_"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._address)
        self._socket.listen()
        threading.Thread(target=self._serve, name="faults", daemon=True).start()
        for event in events:
            if event.seed is not None:
                log(f"fault: seed {event.seed} draws {event}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or `accept` would go on
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for event in self._left:
            self._log(f"fault: {event} did not come: the job ended before that step")

    @property
    def environment(self):
        """Dict of the variable by which the task that leads knows whom to call."""
        return {OBSERVER_VARIABLE: self._address} if self._left else {}

    def watch(self, cluster):
        """Turns to another `LocalCluster`; what was begun with the last one is over."""
        self._ended.set()
        self._cluster, self._ended = cluster, threading.Event()
        self._links = LinkFaults(cluster.network, [task.name for task in cluster.tasks])

    @property
    def _address(self):
        return str(self._folder / "socket")

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(_CALL_SECONDS)
                step = int(connection.recv(32))
                for event in [event for event in self._left if event.step <= step]:
                    self._left.remove(event)
                    self._log(f"fault: {event} comes after step {step}")
                    self._begin(event)
                connection.sendall(b".")

    def _begin(self, event):
        send = functools.partial(self._cluster.send_signal, event.task)
        if event.kind == "kill":
            send(signal.SIGKILL)
        elif event.kind == "preempt":
            send(signal.SIGTERM, to_children=False)
        elif event.kind == "stop":
            send(signal.SIGSTOP)
            self._end_later(event, functools.partial(send, signal.SIGCONT))
        elif event.kind == "slow":
            self._start(self._slow_down, event, send, self._ended)
        else:
            try:
                self._links.begin(event)
            except (OSError, RuntimeError) as error:
                self._log(f"fault: {event} is not possible: {error}")
                return
            self._end_later(event, functools.partial(self._links.end, event))

    def _start(self, function, *args):
        threading.Thread(target=function, args=args, daemon=True).start()

    def _end_later(self, event, end):
        """Ends what lasts for some seconds, unless the cluster has ended before."""
        if event.seconds is not None:
            self._start(self._end, event, end, self._ended)

    def _end(self, event, end, ended):
        ended.wait(event.seconds)
        with contextlib.suppress(OSError, RuntimeError):  # the network has ended
            end()
        self._log(f"fault: {event} is over")

    def _slow_down(self, event, send, ended):
        until = time.monotonic() + (float("inf") if event.seconds is None else event.seconds)
        while not ended.is_set() and time.monotonic() < until:
            send(signal.SIGSTOP)
            ended.wait(_SLICE_SECONDS * (event.factor - 1))
            send(signal.SIGCONT)
            ended.wait(_SLICE_SECONDS)
        self._log(f"fault: {event} is over")


def parse(text, tasks):
    """Reads the text that says which faults a job is to have.

    Example:

    ```python
    parse("kill:worker1@step=20; stop:ps0@step=10,for=5", ["worker-0", "worker-1", "ps-0"])
    ```

    Args:
        tasks: Names of the cluster's tasks.

    Returns:
        A list of `Event`, in the order of their steps.

    Raises:
        ValueError: If it is none; the message shows the grammar.
    """
    try:
        events = [_event(part.strip(), tasks) for part in text.split(";") if part.strip()]
        if not events:
            raise ValueError("There is no fault in it")
    except ValueError as error:
        raise ValueError(f"{error}; {GRAMMAR}\nReceived: {text!r}") from None
    return sorted(events, key=lambda event: event.step)


def _event(text, tasks):
    match = _EVENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} cannot be read")
    kind, task, rest = match.groups()
    if kind not in KINDS:
        raise ValueError(f"There is no fault {kind!r}, only {', '.join(KINDS)}")
    words = {}
    for word in rest.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name in words:
            raise ValueError(f"{word.strip()!r} in {text!r} cannot be read")
        words[name] = value
    seed = None
    if task == "random":
        seed = _number(words, "seed", int, 0)
        most = _number({"within": _DEFAULT_WITHIN, **words}, "within", int, 1)
        words.pop("within", None)
        # Both in any case, so that the task does not depend on what was said of the step.
        drawn = random.Random(seed)
        task, step = drawn.choice(tasks), drawn.randint(1, most)
        words.pop("seed")
        words.setdefault("step", step)
    unknown = set(words) - {"step", *KINDS[kind]}
    if unknown:
        raise ValueError(f"{kind} does not take {', '.join(sorted(unknown))!r}")
    return Event(
        kind,
        _task(task, tasks),
        _number(words, "step", int, 1),
        _number(words, "for", float, 0, above=True) if "for" in words else None,
        _number(words, "factor", float, 1, above=True) if kind == "slow" else None,
        _number(words, "ms", float, 0, above=True) if kind == "delay" else None,
        seed,
    )


def _task(name, tasks):
    by_name = {name: task for task in tasks for name in (task, task.replace("-", ""))}
    found = by_name.get("chief0" if name == "chief" else name)
    if found is None:
        there = ", ".join(task.replace("-", "") for task in tasks)
        raise ValueError(f"The cluster has no task {name!r}, but {there}")
    return found


def _number(words, name, kind, least, above=False):
    if name not in words:
        raise ValueError(f"`{name}` is missing")
    try:
        value = kind(words[name])
    except ValueError:
        value = float("nan")
    good = value > least if above else value >= least
    if not good or value == float("inf"):
        whole = "a whole number" if kind is int else "a number"
        bound = f"above {least}" if above else f"from {least} up"
        raise ValueError(f"`{name}` must be {whole} {bound}, not {words[name]!r}")
    return kind(value)
