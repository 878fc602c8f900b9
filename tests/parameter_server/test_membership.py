"""Workers that come, are lost, leave and come back, and what becomes of their steps."""

import types

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from keras_psplus.cluster.config import ClusterStartupError
from keras_psplus.errors import WorkersLostError
from keras_psplus.parameter_server import scheduler
from keras_psplus.parameter_server.queue import Clocks, Closure, ClosureQueue
from keras_psplus.parameter_server.scheduler import Members, WorkerWatch
from tests.support.clock import Machine, few

WORKERS = range(3)
WORKER = st.sampled_from(WORKERS)
PAIR = range(2)
CHANGES = ["wait", "come", "come", "stranger", "die", "vanish", "return", "tell"]
TIMEOUT = 60.0


class Reachable(Machine):
    """When a chief gives up all of its workers, which it looks for while no step ends."""

    MODULES = (scheduler,)

    def __init__(self):
        super().__init__()
        self.there = set(WORKERS)
        listens = lambda address: int(address) in self.there  # noqa: E731
        self.patch.setattr(scheduler.handshake, "listens", listens)
        self.patch.setattr(scheduler.failure, "mark_failed", lambda: None)
        self.watch = WorkerWatch([f"{i}" for i in WORKERS], TIMEOUT)
        # The last sign of life, the last end of a step, and the first look since then in vain.
        self.sign = self.ended = self.clock.now
        self.in_vain = None

    @rule(seconds=st.sampled_from([1, 100]))
    def take_steps(self, seconds):
        self.clock.sleep(seconds)
        self.sign = self.ended = self.clock.now
        self.in_vain = None

    @rule(seconds=st.sampled_from([6, 30, 61]), there=st.just(set()) | st.sets(WORKER))
    def look(self, seconds, there):
        self.there = there
        self.clock.sleep(seconds)
        now = self.clock.now
        if self.there:
            self.sign, self.in_vain = now, None
        elif self.in_vain is None:
            self.in_vain = now
        try:
            self.watch.check_workers(self.ended)
        except WorkersLostError:
            assert not self.there and now - self.sign > TIMEOUT
        else:
            assert self.in_vain is None or now - self.in_vain <= TIMEOUT


TestReachable = Reachable.TestCase
TestReachable.settings = few


class Coming(Machine):
    """Who is taken in, and whom TensorFlow knows."""

    MODULES = (scheduler,)

    @initialize(may_leave=st.booleans(), absent=st.sets(WORKER))
    def begin(self, may_leave, absent):
        self.lost, self.known, self.present = set(absent), {*WORKERS} - absent, None
        self.there, self.strangers, self.told = self.known.copy(), set(), set()
        # Since which look those that are lost have answered at each.
        self.since, self.let_go = {}, []
        endings = types.SimpleNamespace(
            is_told_to_end=lambda name: int(name[-1]) in self.told, let_go=self.let_go.append
        )
        self.members = Members("abc", self.admit, absent, endings if may_leave else None)
        self.may_leave = may_leave
        silent = lambda tasks: [one for one in tasks if one not in self.there]  # noqa: E731
        self.patch.setattr(scheduler.stalls, "unresponsive_tasks", silent)
        self.patch.setattr(scheduler, "update", lambda present: setattr(self, "present", present))
        self.patch.setattr(scheduler, "SIGNAL", types.SimpleNamespace(is_noted=False))

    def admit(self, name):
        if int(name[-1]) in self.strangers:
            raise ClusterStartupError(f"{name} serves another chief")

    def change(self, worker, how):
        if how in ("die", "return"):
            self.lost.add(worker)
        if how in ("die", "vanish", "return"):
            self.there.discard(worker)
            self.told.discard(worker)
        if how in ("come", "return", "stranger") and worker not in self.there:
            self.there.add(worker)
            self.strangers.discard(worker)
            if how == "stranger":
                self.strangers.add(worker)
        if how == "tell" and worker in self.there and self.may_leave:
            # It is retired.
            self.told.add(worker)
            self.lost.add(worker)

    @rule(
        worker=WORKER,
        how=st.sampled_from(
            ["wait", "come", "come", "stranger", "die", "vanish", "return", "tell"]
        ),
        seconds=st.sampled_from([0.5, 1.5, 3.0]),
        is_chief_told=st.sampled_from([False, False, True]),
    )
    def look(self, worker, how, seconds, is_chief_told):
        self.change(worker, how)
        scheduler.SIGNAL.is_noted = is_chief_told
        self.clock.sleep(seconds)
        now, before = self.clock.now, self.members.absent.copy()
        self.let_go.clear()
        found = self.members.ready(self.lost)
        # One that leaves ends once TensorFlow has forgotten it, or with the whole job.
        leaving = () if scheduler.SIGNAL.is_noted else self.told & before & self.lost
        assert sorted(self.let_go) == [f"worker-{worker}" for worker in sorted(leaving)]
        there = (self.lost & self.there) - self.told
        self.since = {worker: self.since.get(worker, now) for worker in there}
        # gRPC takes a while to find one that it has lost; the others can be called at once.
        ready = {w for w in there if w not in self.known or now - self.since[w] >= 2.0}
        ready -= self.strangers
        forgets = self.may_leave and self.lost - before
        if not (ready or forgets) or not {*WORKERS} - self.lost <= self.there:
            assert found is None
            return
        assert found == ready
        self.members.connect(self.lost - found)
        self.lost -= found
        self.known |= found
        assert self.present == {w: "abc"[w] for w in WORKERS if w not in self.lost}
        assert self.members.absent == self.lost


TestComing = Coming.TestCase
TestComing.settings = few


# Of two functions.
TURNS = object(), object()


class Steps(Machine):
    """Each step is done once, by a worker that is there, whatever becomes of the others."""

    def __init__(self):
        super().__init__()
        self.clocks = Clocks(len(PAIR))
        self.queue = ClosureQueue(len(PAIR), self.clocks)
        # Running ones, with how often their worker was lost before.
        self.count, self.running, self.over = 0, {}, []

    @rule(
        home=st.sampled_from(["free", "chosen", *PAIR]),
        turns=st.sampled_from([*TURNS, TURNS[0], None]),
        count=st.integers(1, 3),
    )
    def put(self, home, turns, count):
        for _ in range(count):
            self.count += 1
            closure = Closure(None, (), f"batch {self.count}", lambda result, run: None)
            closure.turns = turns
            self.put_one(closure, home)

    def put_one(self, closure, home):
        if home == "chosen":
            self.queue.choose(closure, 2)
        elif home == "free":
            self.queue.put(closure)
        else:
            # As its batch was read for a worker, which may be lost since.
            closure.home = home
            self.clocks.give(home)
            self.queue.put(closure, home)

    @rule(worker=st.sampled_from(PAIR))
    def take(self, worker):
        while self.queue._has_next(worker):
            assert worker not in self.queue.lost
            others = [one for one in self.running if one.tried_on == worker]
            closure = self.queue.take(worker)
            assert closure not in self.running and closure not in self.over
            assert closure.tried_on == worker
            for other in others:
                # It has followed another, and this one is next.
                assert other.turns is closure.turns is not None and other.place > 0
            if others:
                assert closure.place == 1 + max(one.place for one in others)
            self.running[closure] = self.queue.losses[worker]

    @rule(worker=st.sampled_from(PAIR))
    def work(self, worker):
        self.take(worker)
        for closure in [one for one in self.running if one.tried_on == worker]:
            self.running.pop(closure)
            closure._end("result", None)
            self.queue.end(closure)
            self.over.append(closure)

    @rule(worker=st.sampled_from(PAIR), is_back=st.booleans(), number=st.integers(1, 3))
    def lose(self, worker, is_back, number):
        """Those under way say so one after the other, when the worker may be back already."""
        self.take(worker)
        for closure in [one for one in self.running if one.tried_on == worker][:number]:
            losses, before = self.running.pop(closure), self.queue.losses[worker]
            lost = self.queue.lost.copy()
            self.queue.lose(closure, losses)
            assert self.queue.lost == lost | ({worker} if losses == before else set())
            assert not closure._is_over.is_set() and closure in self.queue.closures
            if is_back:
                self.queue.welcome(worker)

    @rule(worker=st.sampled_from(PAIR))
    def give_back(self, worker):
        self.take(worker)
        if not self.running:
            return
        closure, _ = self.running.popitem()
        self.queue.give_back(closure)
        assert not closure._is_over.is_set() and closure in self.queue.closures

    @precondition(lambda self: self.running)
    @rule()
    def fail(self):
        """One step fails; the others that are under way are cancelled, and those that wait."""
        self.over += self.queue.closures
        first, *others = self.running
        self.running.clear()
        self.queue.end(first, ValueError("of a step"))
        for closure in others:
            self.queue.give_back(closure)
        with pytest.raises(ValueError, match="of a step"):
            self.queue.raise_error()
        assert self.queue.is_empty and all(one._is_over.is_set() for one in self.over)
        self.clocks.settle()

    @precondition(lambda self: not self.queue.lost)
    @rule(worker=st.sampled_from(PAIR))
    def retire(self, worker):
        if all(closure.tried_on != worker for closure in self.running):
            self.queue.retire(worker)
            assert worker in self.queue.lost

    @precondition(lambda self: self.queue.lost)
    @rule()
    def welcome(self):
        for worker in self.queue.lost.copy():
            self.queue.welcome(worker)

    @precondition(lambda self: not self.running)
    @rule()
    def pause(self):
        with self.queue.paused():
            assert not any(self.queue._has_next(worker) for worker in PAIR)

    @invariant()
    def each_is_in_one_place(self):
        queue = self.queue
        waiting = [*queue._free, *(one for some in queue._waiting for one in some)]
        assert {*queue.closures} == {*waiting, *self.running}
        assert len(queue.closures) == len(waiting) + len(self.running)
        assert {*self.running} == {one for some in queue._running for one in some}
        assert not any(queue._waiting[worker] for worker in queue.lost)

    @invariant()
    def somebody_goes_on(self):
        queue = self.queue
        if not queue.is_empty and not self.running and len(queue.lost) < len(PAIR):
            assert any(queue._has_next(worker) for worker in PAIR)

    @invariant()
    def clocks_count_what_is_under_way(self):
        for worker in PAIR:
            under_way = [one for one in self.queue.closures if one.home == worker]
            assert self.clocks._waiting(worker) == len(under_way)


TestSteps = Steps.TestCase
TestSteps.settings = settings(few, max_examples=70, stateful_step_count=40)
