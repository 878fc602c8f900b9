"""What the chief does for all workers."""

import queue
import threading
import time
from concurrent import futures

import pytest

from keras_psplus.core.jobs import control as module
from keras_psplus.core.jobs.control import run_on_chief
from keras_psplus.core.jobs.failure import PeerLostError


class Control:
    """Two workers' control plane in one process."""

    def __init__(self, texts, is_chief):
        self._texts, self._is_chief = texts, is_chief
        self.exchanges = 0

    def exchange(self, kind, text):
        self.exchanges += 1
        if self._is_chief:
            self._texts.put(text)
            return [text, ""]
        return [self._texts.get(timeout=20), text]


def run(work):
    texts = queue.Queue()
    controls = [Control(texts, is_chief) for is_chief in (True, False)]
    with futures.ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(run_on_chief, control, is_chief, "work", work if is_chief else None)
            for control, is_chief in zip(controls, (True, False))
        ]
        return calls, controls


def test_all_get_what_the_chief_has_found():
    calls, _ = run(lambda: {"step": 3})
    assert [call.result() for call in calls] == [{"step": 3}] * 2
    assert run_on_chief(None, True, "work", lambda: 5) == 5


def test_others_wait_as_long_as_it_takes(monkeypatch):
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.01)
    goes_on = threading.Event()
    threading.Timer(0.2, goes_on.set).start()
    calls, controls = run(lambda: goes_on.wait(20))
    assert [call.result() for call in calls] == [True, True]
    assert controls[0].exchanges == controls[1].exchanges > 1


@pytest.mark.parametrize("kind", [ValueError, OSError, PeerLostError])
def test_what_fails_there_fails_everywhere(kind):
    def work():
        time.sleep(0.01)
        raise kind("ps-1 is full. Received: 3")

    for call in run(work)[0]:
        with pytest.raises(kind, match="ps-1 is full"):
            call.result()
