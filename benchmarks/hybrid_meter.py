"""What steps cost all hosts of a lab, read by the one that leads."""

import json
import os
import pathlib
import statistics
import time

import netlab

_PAUSE_SECONDS = 0.02


class Meter:
    """Notes when steps end, and what all hosts have sent, received and computed meanwhile.

    A phase is `warmup` steps and then `steps` that count. Between phases the launcher changes the
    links: see `asked` and `answered`.

    Args:
        args: With `warmup`, `steps`, `phases` and `tasks`.
    """

    def __init__(self, args):
        self._args = args
        self._phase = self._steps = 0
        self.results = []

    def ended(self, steps=1):
        """Notes that so many steps have ended since the last time."""
        if self._phase == self._args.phases:
            return
        self._steps += steps
        counted = self._steps - self._args.warmup
        if counted == 0:
            self._before, self._times = self._now(), []
            self._last = time.perf_counter()
        elif counted > 0:
            now = time.perf_counter()
            self._times.append(round(1000 * (now - self._last) / steps, 3))
            self._last = now
        if counted == self._args.steps:
            self._close()

    def _close(self):
        after = self._now()
        per_step = {
            what: [(b - a) / self._args.steps for a, b in zip(self._before[what], after[what])]
            for what in after
        }
        median = statistics.median(self._times)
        self.results.append({"times": self._times, "median": median, **per_step})
        self._phase, self._steps = self._phase + 1, 0
        if self._phase < self._args.phases:
            folder = os.environ["HYBRID_FOLDER"]
            asked(folder, self._phase).touch()
            while not answered(folder, self._phase).exists():
                time.sleep(_PAUSE_SECONDS)

    def _now(self):
        """By rank: bytes sent and received, and milliseconds of processor time."""
        counters, ranks = os.environ["NETLAB_COUNTERS"], range(len(self._args.tasks))
        pids = json.loads(pathlib.Path(os.environ["HYBRID_FOLDER"], "pids").read_text())
        return {
            "sent": [netlab.sent_bytes(counters, rank) for rank in ranks],
            "received": [netlab.received_bytes(counters, rank) for rank in ranks],
            "processor": [_processor_ms(pid) for pid in pids],
        }


def asked(folder, phase):
    """The file by which a job asks for the links of a phase."""
    return pathlib.Path(folder, f"asked{phase}")


def answered(folder, phase):
    """The file that says that they are there."""
    return pathlib.Path(folder, f"answered{phase}")


def _processor_ms(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
