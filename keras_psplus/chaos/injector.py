"""Does to a local cluster what was planned, at the steps for which it was."""

import contextlib
import pathlib
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from keras_psplus.chaos import links
from keras_psplus.chaos.spec import Event
from keras_psplus.cluster.monitor.progress import CHAOS_VARIABLE
from keras_psplus.cluster.processes import LocalCluster

_SLICE_SECONDS = 0.02
_CALL_SECONDS = 5.0


class Injector:
    """The faults of one job; each comes once, however often the job is started.

    The chief (or worker 0) calls after the steps for which something is planned and waits until it
    is done, so that it comes at the same step every time.

    Example:

    ```python
    events = spec.parse("kill:worker1@step=20", ["worker-0", "worker-1"])
    with Injector(events, print) as chaos:
        with LocalCluster(command, workers=2, env=chaos.environment) as cluster:
            chaos.watch(cluster)
            cluster.wait()
    ```

    Args:
        log: Function that takes a line of progress.
    """

    def __init__(self, events: Sequence[Event], log: Callable[[str], None]) -> None:
        self._left, self._log = list(events), log
        self._cluster: LocalCluster | None = None
        self._links: links.LinkFaults | None = None
        self._ended = threading.Event()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="keras_psplus_chaos_"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._address)
        self._socket.listen()
        threading.Thread(target=self._serve, name="chaos", daemon=True).start()
        for event in events:
            if event.seed is not None:
                log(f"chaos: seed {event.seed} draws {event}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or `accept` would go on
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for event in self._left:
            self._log(f"chaos: {event} did not come: the job ended before that step")

    @property
    def environment(self) -> dict[str, str]:
        """Dict of the variable by which tasks know when to call."""
        steps = sorted({event.step for event in self._left})
        if not steps:
            return {}
        return {CHAOS_VARIABLE: f"{','.join(map(str, steps))}@{self._address}"}

    def watch(self, cluster: LocalCluster) -> None:
        """Turns to another `LocalCluster`; what was begun with the last one is over."""
        self._ended.set()
        self._cluster, self._ended = cluster, threading.Event()
        self._links = links.LinkFaults(cluster.network, [task.name for task in cluster.tasks])

    @property
    def _address(self) -> str:
        return str(self._folder / "socket")

    def _serve(self) -> None:
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
                    self._begin(event, step)
                connection.sendall(b".")

    def _begin(self, event: Event, step: int) -> None:
        self._log(f"chaos: {event} comes after step {step}")
        assert self._cluster is not None and self._links is not None
        if event.kind in links.KINDS:
            self._disturb(event, self._links, self._ended)
            return
        begin = {
            "kill": self._kill,
            "preempt": self._preempt,
            "stop": self._stop,
            "slow": self._slow,
        }[event.kind]
        begin(event, self._cluster, self._ended)

    def _kill(self, event: Event, cluster: LocalCluster, ended: threading.Event) -> None:
        cluster.send_signal(event.task, signal.SIGKILL)

    def _preempt(self, event: Event, cluster: LocalCluster, ended: threading.Event) -> None:
        cluster.send_signal(event.task, signal.SIGTERM, to_children=False)

    def _stop(self, event: Event, cluster: LocalCluster, ended: threading.Event) -> None:
        cluster.send_signal(event.task, signal.SIGSTOP)
        if event.seconds is None:
            return

        def resume() -> None:
            ended.wait(event.seconds)
            cluster.send_signal(event.task, signal.SIGCONT)
            self._log(f"chaos: {event} is over")

        threading.Thread(target=resume, daemon=True).start()

    def _slow(self, event: Event, cluster: LocalCluster, ended: threading.Event) -> None:
        until = time.monotonic() + (float("inf") if event.seconds is None else event.seconds)
        assert event.factor is not None
        stopped = _SLICE_SECONDS * (event.factor - 1)

        def slow_down() -> None:
            while not ended.is_set() and time.monotonic() < until:
                cluster.send_signal(event.task, signal.SIGSTOP)
                ended.wait(stopped)
                cluster.send_signal(event.task, signal.SIGCONT)
                ended.wait(_SLICE_SECONDS)
            self._log(f"chaos: {event} is over")

        threading.Thread(target=slow_down, daemon=True).start()

    def _disturb(self, event: Event, of_links: links.LinkFaults, ended: threading.Event) -> None:
        try:
            of_links.begin(event)
        except (OSError, RuntimeError) as error:
            self._log(f"chaos: {event} is not possible: {error}")
            return
        if event.seconds is None:
            return

        def mend() -> None:
            ended.wait(event.seconds)
            with contextlib.suppress(OSError, RuntimeError):  # the network has ended
                of_links.end(event)
            self._log(f"chaos: {event} is over")

        threading.Thread(target=mend, daemon=True).start()
