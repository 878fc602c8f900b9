"""Workers that are told to end agree on the batch after which they save."""

import collections
import random
import signal
import subprocess
import sys
import types

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.cluster.process import signals as termination
from keras_psplus.core.backup import fit_progress
from keras_psplus.core.jobs import preemption
from tests.support.clock import Threads, few
from tests.support.jobs import WITHOUT_TENSORFLOW, environment


class Control:
    """A worker's control plane, over the posts of all."""

    def __init__(self, threads, posts, names, numbers):
        self._threads, self._posts, self.names = threads, posts, names
        self._numbers = numbers

    def post(self, name, text):
        is_new = name not in self._posts
        self._posts.setdefault(name, text)
        return is_new

    def wait_for(self, name, whom="another", kind="listening"):
        assert self._threads.wait_for(lambda: name in self._posts), (whom, kind)
        # It is not heard at once.
        self._threads.sleep(6 * self._numbers.random())
        return self._posts[name]

    listen = wait_for


class Fit:
    """A `fit` that can be saved."""

    is_under_way = can_save = True


LAST = 20


def saved_after(workers, told, alone, numbers, monkeypatch):
    """The batches after which workers save, who are told to end while they take steps; and posts.

    Args:
        workers: Number of workers.
        told: Dict from workers to the batch in which each is told.
        alone: Steps that a worker takes without the others.
        numbers: Draws how long steps take, and who is first of those who may go on.
    """
    threads = Threads(preemption, monkeypatch=monkeypatch, choose=numbers.choice)
    monkeypatch.setattr(preemption, "threading", threads)
    names, posts, met = [f"worker-{i}" for i in range(workers)], {}, collections.Counter()
    found = [None] * workers

    def train(i):
        one = preemption.Preemption(Control(threads, posts, names, numbers), names[i], alone)
        one.watch(Fit)
        is_noted = False
        for batch in range(1, LAST + 1):
            threads.sleep(numbers.random())
            if batch % alone == 0:
                met[batch] += 1
                assert threads.wait_for(lambda batch=batch: met[batch] == workers, 1000)
            is_noted = is_noted or told.get(i) == batch
            if one.end_batch(batch == LAST, is_noted):
                found[i] = batch
                return

    for i in range(workers):
        threads.Thread(train, (i,)).start()
    threads.run()
    return found, posts


@few
@given(
    st.sampled_from([1, 2, 10, LAST - 2, LAST - 1, LAST]),
    st.lists(st.none() | st.integers(0, 2), min_size=2, max_size=4),
    st.sampled_from([1, 3]),
    st.integers(0, 1000),
)
def test_all_workers_save_after_the_same_batch(first, later, alone, seed):
    told = {i: first + batches for i, batches in enumerate(later) if batches is not None}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(preemption, "SIGNAL", termination._Signal())
        monkeypatch.setattr(preemption.SIGNAL, "watch", lambda at_once: None)
        numbers = random.Random(seed)
        found, posts = saved_after(len(later), told, alone, numbers, monkeypatch)
    (after,) = {*found}
    first = min(told.values(), default=LAST)
    if first >= LAST:
        # There is nothing to save for.
        assert after is None and not posts
        return
    # One has said it, and all others have confirmed it; its own thread may, too.
    until = int(posts["preempted"])
    assert first < until <= first + 2 * alone and after == (until if until <= LAST else None)
    assert len(later) <= len(posts) <= 1 + len(later)


def test_one_process_saves_after_the_batch_in_which_it_was_told():
    one = preemption.Preemption(None, "this process")
    assert not one.end_batch(False, False)
    # There is nothing to save for.
    assert not one.end_batch(True, True)
    assert one.end_batch(False, True)


class Callbacks:
    """Callbacks of a `fit` that has batches left."""

    params = {"epochs": 2, "steps": 9}
    model = types.SimpleNamespace(stop_training=False)


def test_a_fit_that_is_told_to_end_has_saved(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(preemption.SIGNAL, "is_noted", True)
    monkeypatch.setattr(preemption.SIGNAL, "is_in_order", False)
    progress, saved = fit_progress.FitProgress(), []
    one = preemption.Preemption(None, "worker-1")
    one.check(progress, Callbacks, None)  # No `fit` is under way.
    progress._callbacks, progress.batch = [keras.callbacks.BackupAndRestore(tmp_path)], 3
    with pytest.raises(SystemExit) as ending:
        one.check(progress, Callbacks, lambda: saved.append(1))
    assert ending.value.code == 143 and saved == [1]
    assert "has saved the job after" in caplog.text
    assert caplog.text.endswith("Received: exit code 143\n")


def test_a_fit_without_a_backup_ends_at_once_but_inside_of_one_that_has_it(monkeypatch):
    signals = termination._Signal()
    monkeypatch.setattr(preemption, "SIGNAL", signals)
    without = types.SimpleNamespace(is_under_way=True, can_save=False)
    none = types.SimpleNamespace(is_under_way=False, can_save=False)
    one = preemption.Preemption(None, "worker-1")
    said = []
    try:
        for begun in (without, Fit, without):
            one.watch(begun)
            said.append(signals.at_once)
        for outer in (Fit, without, none):
            one.unwatch(outer)
            said.append(signals.at_once)
    finally:
        signals.ignore()
    line, *inside, last, _ = said
    assert line == last and inside == [None] * 3
    assert line.startswith("worker-1 was told to end (SIGTERM) and ends with nothing saved")


SOURCE = (
    WITHOUT_TENSORFLOW
    + """
import ctypes, os, signal, sys, threading, time
from keras_psplus.cluster.process.signals import SIGNAL

def me():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)

def hang():
    # A mutex that it has: a call that signals do not interrupt.
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)

children = []
for source in sys.argv[1:]:
    if not (child := os.fork()):
        exec(source)
        os._exit(0)
    children.append(child)
for i, child in enumerate(children):
    print(i, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)
# By name: a script, and the exit code of its process, or the signal that ends it.
SCRIPTS = {
    "once": ("SIGNAL.watch(); me(); os._exit(7 if SIGNAL.is_noted else 0)", 7),
    "twice": ("SIGNAL.watch(); me(); me(); time.sleep(9)", termination.EXIT_CODE),
    "twice, while it hangs": (
        "SIGNAL.watch(); threading.Thread(target=lambda: [me(), me()]).start(); hang()",
        termination.EXIT_CODE,
    ),
    "the end of the grace": (
        "os.environ['KERAS_PSPLUS_GRACE'] = '0.5'; SIGNAL.watch(); me(); hang()",
        termination.EXIT_CODE,
    ),
    "nothing to save": ("SIGNAL.watch('a line'); me(); time.sleep(9)", termination.EXIT_CODE),
    "nothing to save, while it hangs": (
        "SIGNAL.watch('a line'); threading.Thread(target=me).start(); hang()",
        termination.EXIT_CODE,
    ),
    "nobody takes its lines": (
        "import logging; logging.getLogger('keras_psplus').addHandler(logging.StreamHandler())\n"
        "logging.getLogger('keras_psplus').handlers[-1].acquire()\n"
        "SIGNAL.watch('a line'); threading.Thread(target=me).start(); hang()",
        termination.EXIT_CODE,
    ),
    # With the handler of this process, at first.
    "processes that are ended as soon as they are forked": (
        "SIGNAL.watch()\n"
        "for _ in range(50):\n"
        "    if not (child := os.fork()):\n"
        "        time.sleep(9)\n"
        "        os._exit(0)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -15:\n"
        "        os._exit(9)\n"
        "time.sleep(0.2)\n"
        "os._exit(8 if SIGNAL.is_noted else 7)",
        7,
    ),
    "beside another one's pipe": (
        "import socket; a, b = socket.socketpair(); b.setblocking(False)\n"
        "signal.set_wakeup_fd(b.fileno()); SIGNAL.watch(); me()\n"
        "os._exit(7 if SIGNAL.is_noted and a.recv(9) == b'\\x0f' else 0)",
        7,
    ),
    "after fit": ("SIGNAL.watch(); SIGNAL.ignore(); me(); time.sleep(9)", -signal.SIGTERM),
    # The launcher ends its tasks at once.
    "no grace": (
        "os.environ['KERAS_PSPLUS_GRACE'] = '0'; SIGNAL.watch(); me(); time.sleep(9)",
        -signal.SIGTERM,
    ),
    # The launcher's grace is not for workers that a job goes on without.
    "a worker that leaves": (
        "os.environ['KERAS_PSPLUS_GRACE'] = '0'; SIGNAL.watch(mode='leave'); SIGNAL.watch(); me()\n"
        "os._exit(7 if SIGNAL.is_noted else 0)",
        7,
    ),
    "a worker that leaves is told twice": (
        "SIGNAL.watch(mode='leave'); me(); me(); time.sleep(9)",
        termination.EXIT_CODE,
    ),
    "a worker that is let go while it hangs": (
        "SIGNAL.watch(mode='leave'); me(); SIGNAL.end_after(0.1); hang()",
        termination.EXIT_CODE,
    ),
    "another thread": (
        "t = threading.Thread(target=SIGNAL.watch); t.start(); t.join(); me(); time.sleep(9)",
        -signal.SIGTERM,
    ),
    # Such as one that reads its data.
    "a process that it has forked": (
        "SIGNAL.watch()\n"
        "if child := os.fork():\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getpid() if SIGNAL.is_noted else child, signal.SIGTERM)\n"
        "    os._exit(8 if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15 else 9)\n"
        "time.sleep(9)",
        8,
    ),
    "a handler of its own": (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(6)); SIGNAL.watch(); me()",
        6,
    ),
}


@pytest.mark.processes
def test_a_process_that_is_told_to_end():
    scripts = [script for script, _ in SCRIPTS.values()]
    command = [sys.executable, "-c", SOURCE, *scripts]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(zip(SCRIPTS, (int(line.split()[1]) for line in done.stdout.splitlines())))
    assert found == {name: code for name, (_, code) in SCRIPTS.items()}
