"""Steps sent to workers, which come, go, and are lost; what they return is collected.

Steps are closures, which another worker runs if one dies. A few are kept under way for every
worker; their results are taken as they come, so that a slow worker holds up nobody. `Clocks` says
which worker is next.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.cluster import handshake
from keras_psplus.cluster.config import ClusterStartupError
from keras_psplus.cluster.monitor import stalls, step_times
from keras_psplus.cluster.monitor.stalls import PendingWait
from keras_psplus.cluster.process.signals import SIGNAL
from keras_psplus.cluster.serving import ShutdownNotifier
from keras_psplus.core.jobs import failure
from keras_psplus.errors import ParameterServerLostError, WorkersLostError
from keras_psplus.log import logger
from keras_psplus.parameter_server.data import Ticket, WorkerIterator
from keras_psplus.parameter_server.queue import (
    Clocks,
    Closure,
    ClosureQueue,
    RemoteWorker,
    Run,
    WorkerCalls,
)
from keras_psplus.parameter_server.worker_function import is_worker_loss
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress


# Errors of the chief about a lost parameter server, or about losing all workers.


@contextlib.contextmanager
def translate_errors(server_addresses: Callable[[], Sequence[str]]) -> Iterator[None]:
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        found = re.search(r"/job:ps/replica:0/task:(\d+)", str(error))
        if not found:
            raise
        index = int(found.group(1))
        addresses = server_addresses()
        failure.mark_failed()
        raise ParameterServerLostError(
            f"ps-{index} ({addresses[index]}) stopped answering; the variables that it held are "
            "lost. Look into that task's log, then start the whole job again: with the "
            "BackupAndRestore callback training resumes where the last backup was made. "
            f"Received: {failure.relevant_line(error)}"
        ) from error


class WorkerWatch:
    """Gives the workers up after a while in which none of them could be reached.

    A host that accepts a connection is enough, where `stalls.unresponsive_tasks` wants an answer:
    a worker that is only stopped may go on, and a stall warning names it.
    """

    def __init__(self, addresses: Sequence[str], timeout: float) -> None:
        self._addresses, self._timeout = addresses, timeout
        self._gone_since: float | None = None

    def check_workers(self, last_end: float) -> None:
        if any(map(handshake.listens, self._addresses)):
            self._gone_since = None
            return
        now = time.monotonic()
        if self._gone_since is None or self._gone_since < last_end:
            # Or a step has ended since, of a worker that was there.
            self._gone_since = now
        named = ", ".join(f"worker-{i} ({a})" for i, a in enumerate(self._addresses))
        if now - self._gone_since > self._timeout:
            failure.mark_failed()
            raise WorkersLostError(
                f"None of the workers has been reachable for {self._timeout:.0f} s: {named}. Look "
                "into their logs and start them again; a job whose chief still runs takes up its "
                f"work by itself then. Received: heartbeat_timeout={self._timeout:g}"
            )
        logger.warning(
            "no worker can be reached: %s; giving up in %.0f s",
            named,
            self._timeout - (now - self._gone_since),
        )


# Detection of closures that do not return, and of other answers that are overdue.
#
# Other strategies' probes know one wait at a time, the present step; a chief has a closure under
# way on each worker.


class StallProbe(stalls.StallProbe):
    def __init__(
        self, queue: ClosureQueue, progress: Progress, spec: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__("chief-0", progress)
        self._queue = queue
        self._workers, self._servers = (
            {f"{job}-{i}": address for i, address in enumerate(spec[job])}
            for job in ("worker", "ps")
        )

    def look(self) -> dict[Any, PendingWait]:
        # Of several closures that a worker has under way, the first one.
        oldest: dict[int | None, Any] = {}
        for closure in self._queue.closures:
            first = oldest.get(closure.tried_on)
            if closure.started and (first is None or closure.started < first.started):
                oldest[closure.tried_on] = closure
        waits: dict[Any, PendingWait] = {
            (id(closure), closure.started): PendingWait(
                f"chief-0 at {closure.about}",
                functools.partial(self._of_closure, f"worker-{closure.tried_on}"),
                closure.started,
            )
            for closure in oldest.values()
        }
        # Its own calls wait for answers, too, also for those to what it has sent before.
        return waits or dict(super().look())

    def _of_closure(self, worker: str) -> str:
        asked = {worker: self._workers[worker], **self._servers}
        silent = stalls.unresponsive_tasks(asked)
        slow = {} if silent else stalls.slow_tasks(asked)
        if worker in silent:
            missing = f"{worker} (no answer; end its process, and another takes the closure)"
        elif silent:
            missing = f"{worker}, which is held up by {', '.join(silent)} (no answer)"
        elif slow:
            listed = ", ".join(
                f"{name} (answers after {took:.1f} s)" for name, took in slow.items()
            )
            missing = f"{worker}; slow: {listed}"
        else:
            missing = f"{worker}, which answers: it is slow, or has no data"
        return f"the closure; not arrived: {missing}"

    def describe(self, entered: int) -> str:
        lost = {f"worker-{index}" for index in self._queue.lost}
        there = {name: a for name, a in self._workers.items() if name not in lost}
        silent = stalls.unresponsive_tasks({**there, **self._servers})
        missing = ", ".join(f"{name} (no answer)" for name in silent)
        return f"an answer; not arrived: {missing or 'none; it may still trace, or wait for data'}"


# Workers of a job that are there at present, and that come and go.
#
# TensorFlow waits for all tasks of a cluster's definition. So a worker that is not there is left
# out of it until it responds, be it one that was lost or one that has never come yet: the
# definition grows, and what parameter servers hold is untouched.


_RETRIES = 4
_FAIL_FAST = "GRPC_FAIL_FAST"
_PATIENCE_SECONDS, _LOOK_SECONDS, _GIVE_UP_SECONDS = 10.0, 1.0, 120.0


# TensorFlow calls all tasks when one comes. By itself it would wait without end for one that dies
# just then, or hangs; here its call fails, and the job goes on without that one.


def connect(spec: Mapping[str, Sequence[str]], protocol: str | None, absent: set[int]) -> None:
    """Connects TensorFlow in the chief to the tasks that are there."""
    # As `ParameterServerStrategy` of TensorFlow does, but for absent workers.
    seen = tf.config.experimental.ClusterDeviceFilters()
    for job, other in (("worker", "ps"), ("ps", "worker")):
        for index in range(len(spec[job])):
            seen.set_device_filters(job, index, [f"/job:{other}", "/job:chief"])
    # A stream of operations that is opened as its worker is lost would wait until it is back.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
    # TensorFlow's default. A variable that is there can be changed while other threads read it.
    os.environ.setdefault(_FAIL_FAST, "use_caller")
    there = {job: dict(enumerate(addresses)) for job, addresses in spec.items()}
    there["worker"] = {i: a for i, a in there["worker"].items() if i not in absent}
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(there), "chief", 0, protocol, cluster_device_filters=seen
    )
    context.set_server_def_retries(_RETRIES)
    context.ensure_initialized()


def update(workers: Mapping[int, str]) -> None:
    """Has TensorFlow know some workers, and no other, while no step is under way.

    It raises an OpError if one cannot be reached, has died or does not answer. TensorFlow knows of
    it all the same, and finds out by the next call whether it is back.
    """
    definition = copy.deepcopy(context.get_server_def())
    for job in definition.cluster.job:
        if job.name == "worker":
            job.tasks.clear()
            for number, address in sorted(workers.items()):
                job.tasks[number] = address
    with _failing_fast(), _silent_ones_cut_off(workers):
        context.context().update_server_def(definition)


@contextlib.contextmanager
def _failing_fast() -> Iterator[None]:
    """Context in which a task's first call fails at once, too, if refused."""
    before = os.environ.get(_FAIL_FAST, "use_caller")
    os.environ[_FAIL_FAST] = "true"
    try:
        yield
    finally:
        os.environ[_FAIL_FAST] = before


@contextlib.contextmanager
def _silent_ones_cut_off(workers: Mapping[int, str]) -> Iterator[None]:
    is_done = threading.Event()
    threading.Thread(
        target=_cut_off_silent_ones, args=(workers, is_done), name="Connection", daemon=True
    ).start()
    try:
        yield
    finally:
        is_done.set()


def _cut_off_silent_ones(workers: Mapping[int, str], is_done: threading.Event) -> None:
    """Breaks the connections to workers that do not answer, for whom TensorFlow waits."""
    began, seconds, told = time.monotonic(), _PATIENCE_SECONDS, set[int]()
    while not is_done.wait(seconds):
        silent = sorted(stalls.unresponsive_tasks(workers))
        waited = time.monotonic() - began
        for worker in [] if is_done.is_set() else silent:
            seconds = _LOOK_SECONDS
            if worker not in told:
                told.add(worker)
                logger.warning(
                    "worker-%d does not answer while TensorFlow connects to the workers: it counts "
                    "as lost, and is taken in when it answers. Received: no answer from %s for "
                    "%.0f s",
                    *(worker, workers[worker], waited),
                )
            if waited > _GIVE_UP_SECONDS:
                logger.error(
                    "worker-%d does not answer, and TensorFlow still waits for it: no step can be "
                    "taken any more. Start the job again; it resumes at its last backup. Received: "
                    "no answer from %s for %.0f s",
                    *(worker, workers[worker], waited),
                )
                failure.exit_now()
            step_times.cut(workers[worker])


_RETRY_SECONDS, _ASK_SECONDS = 0.5, 1.0
# gRPC tries the address of a task that was lost once a second, and calls fail until then.
_SETTLE_SECONDS = 2.0


class Members:
    """Workers that come, and come back.

    `admit` raises `ClusterStartupError` for a worker that is not this job's. With `endings`,
    workers may leave when they are told to end (SIGTERM), so that one that is lost need not come
    back. TensorFlow does not know of those that are `absent`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        admit: Callable[[str], None],
        absent: Collection[int] = (),
        endings: ShutdownNotifier | None = None,
    ) -> None:
        self._addresses, self._admit = dict(enumerate(addresses)), admit
        self.absent, self._endings = set(absent), endings
        self._refused: set[int] = set()
        # Those to whose addresses TensorFlow has connected, and since when the lost ones respond.
        self._known, self._since = self._addresses.keys() - self.absent, dict[int, float]()

    @property
    def may_leave(self) -> bool:
        """Whether workers may leave, so that those that are there are all that are wanted."""
        return self._endings is not None

    def ready(self, lost: Collection[int]) -> set[int] | None:
        """Lost workers to be taken in; None if TensorFlow's view is not to change."""
        there = self._responding(lost)
        there -= self._ending(there)
        self._refused &= there
        found = {worker for worker in self._settled(there) if self._admits(worker)}
        forgets = self.may_leave and set(lost) - self.absent
        others = self._addresses.keys() - lost
        if not (found or forgets) or self._responding(others) < others:
            return None
        return found

    def _ending(self, workers: Collection[int]) -> set[int]:
        """Workers that are told to end, asked each time: addresses are used again."""
        if self._endings is None:
            return set()
        told = {w for w in workers if self._endings.is_told_to_end(f"worker-{w}")}
        # A scheduler that ends the whole job sends it to the chief as well, which saves first.
        for worker in set() if SIGNAL.is_noted else told & self.absent:
            self._endings.let_go(f"worker-{worker}")
        return told

    def _responding(self, workers: Collection[int]) -> set[int]:
        silent = stalls.unresponsive_tasks({w: self._addresses[w] for w in workers})
        return set(workers).difference(silent)

    def _settled(self, there: Collection[int]) -> list[int]:
        now = time.monotonic()
        self._since = {worker: self._since.get(worker, now) for worker in there}
        return [
            worker
            for worker, since in sorted(self._since.items())
            if worker not in self._known or now - since >= _SETTLE_SECONDS
        ]

    def _admits(self, worker: int) -> bool:
        try:
            self._admit(f"worker-{worker}")
        except ClusterStartupError as error:
            if worker not in self._refused:
                logger.warning("a worker that has come is not taken in: %s", error)
            self._refused.add(worker)
            return False
        return True

    def connect(self, absent: Collection[int]) -> None:
        """Has TensorFlow connect to the workers that are not absent, and to no other.

        It raises UnavailableError if one does not respond, or TensorFlow's error if one dies
        meanwhile.
        """
        present = {w: a for w, a in self._addresses.items() if w not in absent}
        for worker in stalls.unresponsive_tasks(present):
            raise tf.errors.UnavailableError(
                None, None, f"/job:worker/replica:0/task:{worker} does not respond"
            )
        self.absent = set(absent)
        self._known |= present.keys()
        update(present)


class Reconnection:
    """Takes workers in that were lost, or were not there before, between steps.

    TensorFlow gives each task's runtime a new table of the functions that others run for it, and a
    step that is under way then may look for its functions in the wrong table.
    """

    def __init__(
        self, queue: ClosureQueue, members: Members, on_back: Callable[[int], None]
    ) -> None:
        self._queue, self._members, self._on_back = queue, members, on_back
        threading.Thread(target=self._run, name="Reconnection", daemon=True).start()

    def _run(self) -> None:
        while lost := self._queue.wait_for_loss():
            # The others go on meanwhile: TensorFlow's own call waits for all of them.
            try:
                found = self._members.ready(lost)
            except RuntimeError as ending:
                if "interpreter shutdown" not in str(ending):
                    raise
                return  # The script ends without the worker.
            if found is None:
                time.sleep(_RETRY_SECONDS)
                continue
            error = self._mend(lost - found)
            if error is not None and is_worker_loss(error):
                logger.warning(
                    "a worker was lost while TensorFlow connected to the workers: %s",
                    failure.relevant_line(error),
                )
                time.sleep(_RETRY_SECONDS)
                continue
            if error is not None:
                self._queue.fail(error)
            for worker in sorted(found):
                if error is None:
                    self._on_back(worker)
                # Or else steps find out whether it is there.
                self._queue.welcome(worker)

    def _mend(self, absent: set[int]) -> Exception | None:
        with self._queue.paused():
            try:
                self._members.connect(absent)
            except Exception as error:
                return error
        return None


def retire_leaving(queue: ClosureQueue, told_to_end: Callable[[], Iterable[str]]) -> None:
    before: set[str] = set()
    while not queue.is_closed:
        told = set(told_to_end())
        # A scheduler that ends the whole job sends it to the chief as well, which saves first.
        for name in [] if SIGNAL.is_noted else sorted(told & before):
            worker = int(name.rpartition("-")[2])
            if worker not in queue.lost:
                logger.info("%s is told to end (SIGTERM): others take its next steps", name)
                queue.retire(worker)
        before = told
        time.sleep(_ASK_SECONDS)


_LOOK_FOR_ERRORS_SECONDS = 0.5
_LOOK_FOR_WORKERS_SECONDS = 5.0


class Lane:
    """A thread that runs one closure after another on a worker.

    Where steps overlap, a worker has two: one step reads while the other sends.
    """

    def __init__(self, worker: RemoteWorker, queue: ClosureQueue) -> None:
        self._worker, self._queue, self._calls = worker, queue, WorkerCalls(worker)
        threading.Thread(target=self._run, name=f"Lane-{worker.name}", daemon=True).start()

    def _run(self) -> None:
        while (closure := self._queue.take(self._worker.index)) is not None:
            self._process(closure)
            # Else it would be kept, with its result, until there is another one.
            del closure

    def _process(self, closure: Closure) -> None:
        queue, losses = self._queue, self._queue.losses[self._worker.index]
        self._calls.cancellation = queue.cancellation
        try:
            closure.execute_on(self._calls)
        except Exception as error:
            self._calls.clear_error()
            # Of calls that end because another one has failed, which says why.
            is_derived = isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)
            if queue.error is not None or is_derived or queue.is_passing(error):
                queue.give_back(closure)
            elif is_worker_loss(error):
                self._worker.forget()
                queue.lose(closure, losses)
            else:
                queue.end(closure, error)
            self._release_next()
        else:
            queue.end(closure)

    def _release_next(self) -> None:
        """Lets a step go on that waits for what the failed one has not written."""
        if (turns := self._queue.turns_under_way(self._worker.index)) is not None:
            with contextlib.suppress(tf.errors.OpError, RuntimeError):
                self._calls.run(turns.release)


class Scheduler:
    """The closures of one job.

    `check_workers` is called now and then while no closure returns, with when one did last, and may
    raise; `window` is how many closures that allow it a worker has under way.
    """

    def __init__(
        self,
        num_workers: int,
        check_workers: Callable[[float], None],
        members: Members,
        on_worker_back: Callable[[str], None] | None = None,
        window: int = 1,
        absent: Iterable[int] = (),
    ) -> None:
        self._on_worker_back = on_worker_back
        self._check_workers, self._window = check_workers, window
        self._members = members
        # Steps that keep a worker busy: those under way, and the one after them.
        self._enough = 2
        self._clocks = Clocks(num_workers)
        self.queue = queue = ClosureQueue(num_workers, self._clocks, absent)
        # Threads hold the queue, which ends them when nothing holds this.
        weakref.finalize(self, queue.close).atexit = False
        self._workers = [RemoteWorker(index) for index in range(num_workers)]
        for worker in self._workers:
            for _ in range(window):
                Lane(worker, queue)
        Reconnection(queue, members, weakly(self._note_return))

    def _note_return(self, worker: int) -> None:
        self._workers[worker].forget()
        if self.queue.losses[worker]:
            logger.warning("worker-%d is back", worker)
        else:
            logger.info("worker-%d has joined, and takes steps from now on", worker)
        if self._on_worker_back is not None:
            self._on_worker_back(f"worker-{worker}")

    def takers(self) -> list[int]:
        """Workers that a synchronous step is cut for; of a range, those there."""
        with self.queue.changed:
            lost = self.queue.lost if self._members.may_leave else ()
            there = [worker.index for worker in self._workers if worker.index not in lost]
        return there or [worker.index for worker in self._workers]

    def take(self, iterator: WorkerIterator, count: int) -> Ticket | None:
        """Reserves batches that workers read, and a worker for their steps; None at the end."""
        self._wait_until_free()
        ticket = iterator.take(count, self._free, self._check_for_errors)
        if ticket is not None:
            with self.queue.changed:
                self._clocks.give(ticket.worker)
        return ticket

    def begin(self, bound: float) -> None:
        """Begins an epoch, whose workers are at most so many steps ahead of the slowest."""
        with self.queue.changed:
            self._clocks.begin(bound)

    def _wait_until_free(self) -> None:
        with self.queue.changed:
            if self.queue.is_empty:
                self._clocks.settle()
        self._wait_until(self._free)

    def _free(self) -> list[int]:
        with self.queue.changed:
            return self._clocks.free(self._enough)

    def submit(
        self,
        function: tf.types.experimental.ConcreteFunction,
        args: tuple[Any, ...],
        on_done: Callable[[Any, Run], object],
        about: str,
        ticket: Ticket | None = None,
        turns: Any = None,
        make: Callable[..., Closure] = Closure,
    ) -> Closure:
        """Schedules a function once a worker has room for it in its queue.

        The last argument is read by the `ticket`, if workers read the data. With `turns`, a
        worker may begin with it before it is done with the one before, of the same.
        """
        self._enough = 1 + (1 if turns is None else self._window)
        if ticket is None:
            self._wait_until_free()
        closure = make(function, args, about, on_done)
        closure.ticket, closure.turns = ticket, turns
        self.queue.raise_error()
        if ticket is None:
            self.queue.choose(closure, self._enough)
        else:
            closure.home = ticket.worker
            self.queue.put(closure, closure.home)
        return closure

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds that results bring about; raises a worker's error."""
        self._wait_until(condition)
        if not condition():
            self.join()

    def join(self) -> None:
        self._wait_until(lambda: self.queue.is_empty)
        self.queue.raise_error()

    def _check_for_errors(self) -> None:
        self.queue.raise_error()
        self._check_workers(self.queue.last_end)

    def _wait_until(self, condition: Callable[[], Any]) -> None:
        looked = time.monotonic()
        while True:
            with self.queue.changed:
                if condition() or self.queue.error is not None:
                    return
                self.queue.changed.wait(_LOOK_FOR_ERRORS_SECONDS)
            now = time.monotonic()
            if now - max(looked, self.queue.last_end) > _LOOK_FOR_WORKERS_SECONDS:
                looked = now
                self._check_workers(self.queue.last_end)


def weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    """Function that calls a method for as long as something else holds its object."""
    reference = weakref.WeakMethod(method)

    def call(worker: int) -> None:
        if (held := reference()) is not None:
            held(worker)

    return call
