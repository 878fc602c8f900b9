"""The roll call at start: tasks that come late, die, and come again, by a simulated network."""

import concurrent.futures
import random
import types

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keras_psplus.cluster import handshake, preflight
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig
from keras_psplus.cluster.handshake import PeerIdentity
from tests.support.clock import Threads, few

TIMEOUT = 50.0
# A round of calls of a host that is down, and the courtesies of a large cluster.
SLACK = 15.0


class Network:
    """In the place of `handshake.dial` and of what a task listens with.

    Attributes:
        down: Ports of hosts that drop what is sent to them.
        closing: Ports that are closed, until TensorFlow's server is there.
        servers: Ports of TensorFlow's servers.
    """

    def __init__(self, monkeypatch, choose, is_dropped=lambda: False):
        self._is_dropped = is_dropped
        self.threads = Threads(preflight, handshake, monkeypatch=monkeypatch, choose=choose)
        self.listening, self.calls = {}, 0
        self.down, self.closing, self.servers = set(), set(), set()
        self._longest = 0.0
        network = self

        class Channel:
            def __init__(self, address, gate, answer, *_):
                self._address = address.removeprefix("[::]:")
                network.listening[self._address] = answer

            def close(self):
                network.listening.pop(self._address, None)

        class Pool(concurrent.futures.Executor):
            """All calls begin at once, and the longest says how long they take."""

            def submit(self, function, *args):
                future = concurrent.futures.Future()
                try:
                    future.set_result(function(*args))
                except OSError as error:
                    future.set_exception(error)
                return future

            def shutdown(self, *_, **__):
                seconds, network._longest = network._longest, 0.0
                network.threads.sleep(seconds)

        futures = types.SimpleNamespace(ThreadPoolExecutor=lambda max_workers: Pool())
        for module, name, value in (
            (preflight, "concurrent", types.SimpleNamespace(futures=futures)),
            (preflight, "check_own_address", lambda *_: None),
            (preflight, "is_local", lambda host: True),
            (handshake, "threading", self.threads),
            (handshake, "ChannelServer", Channel),
            (handshake, "dial", self.dial),
        ):
            monkeypatch.setattr(module, name, value)

    def dial(self, address, mine, job, timeout):
        self.calls += 1
        port = address.partition(":")[2]
        if port in self.down or self._is_dropped():
            self._longest = max(self._longest, timeout)
            raise OSError("no answer (host down, or a firewall drops the packets)")
        if port in self.servers:
            return None
        if port in self.closing:
            raise ConnectionResetError("it closed the connection")
        if port not in self.listening:
            raise ConnectionRefusedError(handshake.REFUSED)
        return PeerIdentity.decode(self.listening[port](mine.encode(), "host"), True)


class Task:
    """A task that takes part in the roll call, and then serves, until it is killed."""

    def __init__(self, network, config, timeout=TIMEOUT, gap=0.0, **options):
        self._network, self._gap, self.lines = network, gap, []
        self._options = {"timeout": timeout, "log": self.lines.append, **options}
        self.config, self.port = config, config.address.partition(":")[2]
        self.came = self.began = self.ended = self.outcome = self._thread = None

    def start(self):
        self.came = self.came or self._network.threads.now
        self.began, self.ended, self.outcome = self._network.threads.now, None, None
        self._network.down.discard(self.port)
        self._thread = self._network.threads.Thread(self._run)
        self._thread.start()

    def kill(self):
        self._network.threads.kill(self._thread)
        self._network.listening.pop(self.port, None)
        self._network.closing.discard(self.port)
        self._network.servers.discard(self.port)

    def _run(self):
        try:
            self.outcome = preflight.wait_for_cluster(self.config, **self._options)
        except ClusterStartupError as error:
            self.outcome = error
        self.ended = self._network.threads.now
        if not isinstance(self.outcome, Exception):
            self._network.closing.add(self.port)
            self._network.threads.sleep(self._gap)
            self._network.closing.remove(self.port)
            self._network.servers.add(self.port)


MOMENTS = st.sampled_from([0.1, 2.0, 2.9, 11.0])
# When it is killed after its start, and after how long it comes again.
DEATH = st.none() | st.tuples(st.sampled_from([0.2, 1.0, 3.5, 14.0]), MOMENTS)
# When it starts, its death, the seconds between its roll call and its server, and whether its host
# is up before it starts.
LIVES = st.lists(
    st.tuples(MOMENTS, DEATH, st.sampled_from([0.0, 0.5, 4.0, 40.0]), st.booleans()),
    min_size=2,
    max_size=6,
)
NUMBERS = st.randoms(use_true_random=False)


fewer = settings(few, max_examples=12)


def cluster_of(workers, **more):
    ports = iter(range(1, 100))
    jobs = {"worker": workers, **more}
    return {job: tuple(f"h:{next(ports)}" for _ in range(count)) for job, count in jobs.items()}


def called(lives, is_large, numbers, timeout=TIMEOUT, dropped=0.0):
    """Tasks after a roll call of all, in which each has one of some lives, or never comes.

    Args:
        dropped: Share of the calls that do not come through.
    """
    cluster = cluster_of(len(lives))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(preflight, "EVERYBODY", 2 if is_large else 32)
        network = Network(monkeypatch, numbers.choice, lambda: numbers.random() < dropped)
        tasks = {}
        for i, life in enumerate(lives):
            if life is None:
                continue
            start, death, gap, is_up = life
            config = TaskConfig(cluster, "worker", i)
            tasks[i] = task = Task(network, config, timeout, gap, all_wait=True)
            if not is_up:
                network.down.add(task.port)
            network.threads.after(start, task.start)
            if death is not None:
                after, away = death
                network.threads.after(start + after, task.kill)
                network.threads.after(start + after + away, task.start)
        network.threads.run()
    return tasks


# One that comes back to another's port that closes each connection, as a proxy's does.
CLOSED = [(0.1, None, 40.0, True), (0.1, (14.0, 2.0), 0.0, True)]


@fewer
@example(CLOSED, False, 0.0, random.Random(0))
@given(LIVES, st.booleans(), st.sampled_from([0.0, 0.0, 0.4]), NUMBERS)
def test_all_go_on_once_all_have_come_and_nobody_before(lives, is_large, dropped, numbers):
    tasks = called(lives, is_large, numbers, 200.0, dropped).values()
    came, last = max(task.came for task in tasks), max(task.began for task in tasks)
    for task in tasks:
        assert task.outcome == set(), task.outcome
        assert came <= task.ended <= last + (100 if dropped else SLACK)


@fewer
@given(LIVES, st.integers(0, 5), st.booleans(), NUMBERS)
def test_for_one_that_never_comes_all_wait_as_long_as_they_may(lives, never, is_large, numbers):
    never %= len(lives)
    lives[never] = None
    for i, task in called(lives, is_large, numbers, timeout=12.0).items():
        message = f"{task.outcome}"
        assert isinstance(task.outcome, ClusterStartupError), message
        assert 12 <= task.ended - task.began <= 12 + SLACK
        # In a large cluster the first one knows, if it comes.
        names_it = f"  worker-{never} at h:{never + 1}: " in message
        assert names_it or (is_large and i)


@few
@given(
    st.lists(st.none() | MOMENTS, min_size=1, max_size=5),
    st.lists(MOMENTS, max_size=2),
    st.integers(0, 4),
    st.sets(st.integers(1, 5)),
)
def test_a_spare_worker_is_not_waited_for(workers, servers, spare, down):
    config = TaskConfig(cluster_of(len(workers), ps=len(servers), chief=1), "chief", 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        network = Network(monkeypatch, lambda ready: ready[0])
        network.down.update(f"{port}" for port in down)

        def serve(port):
            network.down.discard(port)
            network.servers.add(port)

        for number, moment in enumerate([*workers, *servers], 1):
            if moment is not None:
                network.threads.after(moment, lambda port=f"{number}": serve(port))
        options = {"job_types": ("ps", "worker"), "spare_workers": spare}
        chief = Task(network, config, timeout=15.0, **options)
        chief.start()
        network.threads.run()
    seconds = chief.ended - chief.began
    come = sorted(moment for moment in workers if moment is not None)
    needed = len(workers) - spare
    if needed > len(come):
        assert isinstance(chief.outcome, ClusterStartupError) and 15 <= seconds <= 15 + SLACK
        return
    enough = max([0, *come[: max(0, needed)], *servers])
    assert enough <= seconds <= enough + SLACK and len(chief.outcome) <= max(0, spare)
    for i, moment in enumerate(workers):
        # In the last round it may just not have been there.
        if f"worker-{i}" in chief.outcome:
            assert moment is None or moment > seconds - 3
        else:
            assert moment is not None and moment <= seconds


@pytest.fixture
def network(monkeypatch):
    return Network(monkeypatch, lambda ready: ready[0])


def start(network, workers, missing=(), **options):
    cluster = cluster_of(workers)
    tasks = {
        i: Task(network, TaskConfig(cluster, "worker", i), **options)
        for i in range(workers)
        if i not in missing
    }
    for task in tasks.values():
        task.start()
    return tasks


def test_a_missing_task_is_named_with_those_who_are_here(network):
    for i, task in start(network, 3, [2], timeout=11.5).items():
        network.threads.run()
        message = str(task.outcome)
        assert "1 of 3 tasks did not come within 12 s" in message
        assert f"Here: worker-{i} (this task, h:{i + 1})" in message
        assert f"worker-{1 - i}" in message.split("Missing:")[0]
        assert "worker-2 at h:3: connection refused" in message
        assert "Received: timeout=11.5" in message
        (line,) = task.lines
        assert line.startswith("waiting for worker-2 (h:3); here: ") and "; 10 s of 12 s" in line


def test_in_a_large_cluster_the_first_task_says_who_is_missing(network, monkeypatch):
    monkeypatch.setattr(preflight, "EVERYBODY", 4)
    tasks = start(network, 12, [5], timeout=25.0, all_wait=True)
    network.threads.run()
    # The first, and those that 5 is a neighbour of; the others have it from the first.
    for i, task in tasks.items():
        message = str(task.outcome)
        if i in (0, 1, 3, 4, 6, 9):
            assert "1 of " in message and "worker-5 at h:6: connection refused" in message
        else:
            assert "did not find all 12 tasks" in message and f"on worker-{i}" in message
    assert any("worker-0 (h:1) to find all 12" in line for line in tasks[7].lines)


def test_tasks_of_a_large_cluster_call_a_few(network, monkeypatch):
    monkeypatch.setattr(preflight, "EVERYBODY", 4)
    (last,) = start(network, 24, range(23), all_wait=True).values()
    network.threads.kill(last._thread)
    tasks = start(network, 24, [23], all_wait=True)

    def come():
        assert all(task.ended is None for task in tasks.values())
        network.calls = 0
        last.start()

    network.threads.after(20, come)
    network.threads.run()
    assert {frozenset(task.outcome) for task in [last, *tasks.values()]} == {frozenset()}
    # The calls that the last one's coming brings about. Each calling each would be 552.
    assert network.calls < 250
