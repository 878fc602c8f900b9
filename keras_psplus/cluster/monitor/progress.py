"""Progress of this process, written by the training thread and read by others."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.step_times import StepTimes

# The path of a Unix socket that hears of each step of a job, whose training waits for its answer.
OBSERVER_VARIABLE = "KERAS_PSPLUS_STEP_OBSERVER"
_PATIENCE_SECONDS = 60.0


class Progress:
    """The step that a process is at, and how many it has done.

    Training pays for it with a few assignments in Python for each call of a compiled function.

    Args:
        leads: Whether this process's steps count as those of the job.

    Attributes:
        doing: What it does at present, such as `"training step"`; None between two steps.
        entered: How many times it has begun with something.
        steps: How many training steps it has done.
        total: The same of all strategies of this process together.
        observers: Functions that are called with `steps` when it has grown, and waited for.
        times: Function that returns a dict from tasks to the `StepTimes` of their training steps.
        begin_epoch: Function that is called when the steps of an epoch begin.
        timing: Function of the number of steps in a call of a compiled function, which returns the
            context of that call.
    """

    total = 0

    def __init__(self, leads: bool = False) -> None:
        self.doing: str | None = None
        self.entered = self.steps = 0
        self.times: Callable[[], dict[str, StepTimes]] = dict
        self.begin_epoch: Callable[[], None] = lambda: None
        self.timing: Callable[[int], contextlib.AbstractContextManager[None]] = lambda steps: (
            contextlib.nullcontext()
        )
        address = os.environ.get(OBSERVER_VARIABLE) if leads else None
        self.observers: list[Callable[[int], None]] = []
        if address:
            self.observers.append(functools.partial(_tell, address))

    @property
    def at(self) -> str | None:
        """Present activity, with the step's number; None between two steps."""
        doing = self.doing
        return f"{doing} {self.steps + 1}" if doing == "training step" else doing

    def begin(self, what: str) -> None:
        self.entered += 1
        self.doing = what

    def end(self) -> None:
        self.doing = None

    def count(self, steps: int) -> None:
        self.steps += steps
        Progress.total += steps
        for observer in self.observers:
            observer(self.steps)


def _tell(address: str, steps: int) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as observer:
        observer.settimeout(_PATIENCE_SECONDS)
        observer.connect(address)
        observer.sendall(str(steps).encode())
        observer.recv(1)
