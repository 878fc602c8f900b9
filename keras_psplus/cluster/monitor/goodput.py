"""Goodput of a job: time of new training steps over wall time.

The task that leads keeps its account in a small file of the job's folder, which it overwrites after
each batch, so that the launcher and the next start have it when the task is killed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

TRAINING, TRACING, REPEATED, SAVES = "training", "tracing", "repeated", "saves"
EVALUATION = "evaluation"
_KINDS = (TRAINING, TRACING, REPEATED, SAVES, EVALUATION)
_FORM = struct.Struct(f"<{2 + 3 + 1 + len(_KINDS)}d")


class Account(NamedTuple):
    """Seconds of one process's training.

    Attributes:
        began, ended: When its first `fit` began to train, and when this was written.
        place: Number of the `fit`, the epoch and the batch up to which it has trained.
        repeated_steps: Number of steps that an earlier start had taken before.
        seconds: Seconds by kind.
    """

    began: float
    ended: float
    place: tuple[float, float, float]
    repeated_steps: float
    seconds: dict[str, float]


class TimeSheet:
    """Adds up the seconds of this process, and keeps them in a file."""

    def __init__(self, path: pathlib.Path) -> None:
        before = read(path)
        self._reached = (0.0, 0.0, 0.0) if before is None else before.place
        self._seconds = dict.fromkeys(_KINDS, 0.0)
        self._began = self._repeated_steps = 0.0
        self._place = (0.0, 0.0, 0.0)
        self._since: float | None = None
        self._has_traced = False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def begin_epoch(self, fit: int, epoch: int) -> None:
        """Notes that the steps of an epoch begin."""
        self._since = time.time()
        self._began = self._began or self._since
        self._place = float(fit), float(epoch), 0.0

    def end_batches(self, batch: int, steps: int) -> None:
        """Notes that batches of the present epoch are done."""
        self._place = *self._place[:2], float(batch)
        is_again = self._place <= self._reached
        kind = REPEATED if is_again else TRAINING
        if not self._has_traced:
            self._has_traced, kind = True, TRACING
        self._repeated_steps += steps * is_again
        self._spend(kind)
        self._write()

    def pause(self) -> None:
        """Counts what is under way as training: something else begins."""
        if self._since is not None:
            self._spend(TRAINING)
            self._since = None

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Context of something else than steps."""
        began, was_on = time.time(), self._since is not None
        try:
            yield
        finally:
            took = time.time() - began
            self._seconds[kind] += took
            if was_on and self._since is not None:
                self._since += took
            self._write()

    def _spend(self, kind: str) -> None:
        now = time.time()
        if self._since is not None:
            self._seconds[kind] += max(0.0, now - self._since)
        self._since = now

    def _write(self) -> None:
        place = max(self._place, self._reached)
        values = self._began, time.time(), *place, self._repeated_steps, *self._seconds.values()
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self._file, _FORM.pack(*values), 0)


def read(path: pathlib.Path) -> Account | None:
    """Reads the account of a task; None if it has not trained."""
    try:
        began, ended, *rest = _FORM.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Account(began, ended, tuple(rest[:3]), rest[3], dict(zip(_KINDS, rest[4:])))


class Goodput:
    """Shares of the wall time of a job, over all of its starts."""

    def __init__(self, began: float) -> None:
        self._began = self._last = began
        self._seconds = dict.fromkeys((*_KINDS, "start", "restart"), 0.0)
        self._starts = 0
        self._steps = 0.0

    def add(self, account: Account | None, ended: float) -> None:
        """Adds a start of the job that has ended."""
        kind = "restart" if self._starts else "start"
        self._starts += 1
        if account is None or account.began < self._last:
            self._seconds[kind] += ended - self._last
            self._last = ended
            return
        self._seconds[kind] += account.began - self._last
        for name, seconds in account.seconds.items():
            # After a restart, what is traced again is its cost, too.
            self._seconds[kind if kind == "restart" and name == TRACING else name] += seconds
        self._steps += account.repeated_steps
        self._last = account.ended

    def summary(self, ended: float) -> dict[str, Any]:
        """Fields of the JSON log."""
        wall = max(ended - self._began, 1e-9)
        # The rest of the script after its last call, and the end of its processes.
        spent = self._seconds | {"end": max(0.0, ended - self._last) if self._starts else 0.0}
        known = {f"{name}_s": round(seconds, 3) for name, seconds in spent.items()}
        return {
            "goodput": round(self._seconds[TRAINING] / wall, 4),
            "wall_s": round(wall, 3),
            **known,
            "other_s": round(max(0.0, wall - sum(spent.values())), 3),
            "repeated_steps": round(self._steps),
            "restarts": max(0, self._starts - 1),
        }


def describe(summary: dict[str, Any]) -> str:
    parts = []
    for name in ("start", TRACING, "restart", REPEATED, SAVES, EVALUATION, "end", "other"):
        seconds = summary[f"{name}_s"]
        if seconds >= 0.05:
            steps = f" ({summary['repeated_steps']} steps)" if name == REPEATED else ""
            parts.append(f"{name} {seconds:.1f} s{steps}")
    return (
        f"goodput {summary['goodput']:.0%}: new steps took {summary['training_s']:.1f} s of "
        f"{summary['wall_s']:.1f} s; {', '.join(parts) or 'nothing else'}"
    )
