"""What steps cost all hosts of a lab, read by the one that leads."""

import json
import os
import pathlib
import statistics
import time

import netlab


class Meter:
    """Notes when steps end, and what all hosts have sent, received and computed meanwhile.

    The first `warmup` steps do not count, the `steps` after them do.

    Args:
        args: With `warmup`, `steps` and `tasks`.
    """

    def __init__(self, args):
        self._args = args
        self._steps = 0
        self.results = None

    def ended(self, steps=1):
        """Notes that so many steps have ended since the last time."""
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
        self.results = {"times": self._times, "median": statistics.median(self._times), **per_step}

    def _now(self):
        """By rank: bytes sent and received, and milliseconds of processor time."""
        counters, ranks = os.environ["NETLAB_COUNTERS"], range(len(self._args.tasks))
        pids = json.loads(pathlib.Path(os.environ["NETLAB_PIDS"]).read_text())
        return {
            "sent": [netlab.sent_bytes(counters, rank) for rank in ranks],
            "received": [netlab.received_bytes(counters, rank) for rank in ranks],
            "processor": [_processor_ms(pid) for pid in pids],
        }


def _processor_ms(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
