"""A clock that nobody waits for, threads that live by it, and machines of events."""

import threading

import hypothesis
import pytest
from hypothesis.stateful import RuleBasedStateMachine

LONG = 1e5
few = hypothesis.settings(
    max_examples=50, stateful_step_count=20, derandomize=True, deadline=None, database=None
)


class Clock:
    """In the place of the module `time`: sleeping lets what is planned happen, at once."""

    def __init__(self, *modules, monkeypatch):
        self.now, self._planned = 1000.0, []
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.reach(self.now + seconds)

    def reach(self, moment):
        self.now = max(self.now, moment)
        assert self.now < LONG, "nothing happens any more"
        due = [plan for plan in self._planned if plan[0] <= self.now]
        self._planned = [plan for plan in self._planned if plan not in due]
        for _, act in sorted(due, key=lambda plan: plan[0]):
            act()

    def after(self, seconds, act):
        """Plans a call of a function."""
        self._planned.append((self.now + seconds, act))


class Machine(RuleBasedStateMachine):
    """Events in, actions out, by a `Clock` in the place of `time` in some modules."""

    MODULES = ()

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock(*self.MODULES, monkeypatch=self.patch)

    def teardown(self):
        self.patch.undo()


class Threads(Clock):
    """Also in the place of `threading`: of its threads one runs at a time, until it waits.

    Args:
        choose: Function of a list that returns one of it: who is next of those that may go on.
    """

    def __init__(self, *modules, monkeypatch, choose=lambda ready: ready[0]):
        super().__init__(*modules, monkeypatch=monkeypatch)
        self._threads, self._choose = [], choose
        self._back, self._current = threading.Semaphore(0), None

    def Thread(self, target, args=(), daemon=False, name=None):  # noqa: N802
        return _Thread(self, lambda: target(*args), daemon)

    def Event(self):  # noqa: N802
        return _Event(self)

    def sleep(self, seconds):
        self.wait_for(lambda: False, seconds)

    def wait_for(self, condition, seconds=LONG):
        """Whether a condition holds, within some seconds."""
        if not condition():
            self._current.wait(self.now + seconds, condition)
        return condition()

    def begin(self, thread):
        self._threads.append(thread)

    def kill(self, thread):
        """Has a thread end where it waits."""
        thread.is_killed = True

    def run(self):
        """Lets all threads run to their ends, but for daemons; raises what one has raised."""
        try:
            while self._planned or any(not thread.daemon for thread in self._threads):
                ready = [one for one in self._threads if one.is_ready()]
                if ready:
                    self._go_on(self._choose(ready))
                else:
                    ends = (one.until for one in self._threads)
                    self.reach(min([*ends, *(when for when, _ in self._planned)]))
        finally:
            for thread in list(self._threads):
                self.kill(thread)
                self._go_on(thread)

    def _go_on(self, thread):
        self._current = thread
        thread.turn.release()
        self._back.acquire()
        if thread.is_over:
            self._threads.remove(thread)
            if thread.error is not None:
                raise thread.error

    def give_way(self):
        self._back.release()


class _Killed(BaseException):
    """End of a thread that is killed."""


class _Thread:
    def __init__(self, threads, run, daemon):
        self._threads, self._run, self.daemon = threads, run, daemon
        self.turn, self.error = threading.Semaphore(0), None
        self.is_killed = self.is_over = False
        self.until, self._condition = 0.0, lambda: True

    def start(self):
        threading.Thread(target=self._live, daemon=True).start()
        self._threads.begin(self)

    def _live(self):
        self.turn.acquire()
        try:
            if not self.is_killed:
                self._run()
        except _Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._threads.give_way()

    def is_ready(self):
        return self.is_killed or self.until <= self._threads.now or self._condition()

    def wait(self, until, condition):
        if not self.is_killed:
            self.until, self._condition = until, condition
            self._threads.give_way()
            self.turn.acquire()
        if self.is_killed:
            raise _Killed

    def join(self, timeout=LONG):
        self._threads.wait_for(lambda: self.is_over, timeout)


class _Event:
    def __init__(self, threads):
        self._threads, self._is_set = threads, False

    def is_set(self):
        return self._is_set

    def set(self):
        self._is_set = True

    def clear(self):
        self._is_set = False

    def wait(self, seconds=LONG):
        return self._threads.wait_for(self.is_set, seconds)
