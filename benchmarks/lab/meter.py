"""Costs of steps on all hosts of a lab, read by the leading task."""

import json
import os
import pathlib
import statistics
import time

from lab import handshake, wire

RESULT = "result: "  # what a line with figures begins with
_SECONDS_TO_BEGIN = 240
_SECONDS_TO_SET = 60


class Leader:
    """The leading task's connection to the lab: sets rates, and reads counters.

    Args:
        jobs: The job of each host's task.
        trainers: Ranks of the tasks that train.
    """

    def __init__(self, jobs, trainers):
        self.jobs, self._trainers = jobs, trainers
        self._folder, self._asked = os.environ["LAB_FOLDER"], 0

    def set_rate(self, rate):
        """Has all links set to a rate."""
        handshake.ask(self._folder, self._asked, rate, _SECONDS_TO_SET)
        self._asked += 1

    def say_done(self):
        """Ends the job: all figures are there."""
        handshake.say_done(self._folder)

    def wait_for_others(self):
        """Waits until all that train have begun."""
        handshake.wait_until_ready(self._folder, self._trainers, _SECONDS_TO_BEGIN)

    def now(self):
        """Dict of what each host has sent and received, and milliseconds of processor time."""
        hosts = json.loads(pathlib.Path(self._folder, "hosts").read_text())
        counted = [wire.traffic(hosts["counters"], device) for device in hosts["devices"]]
        if len(set(hosts["devices"])) < len(counted):  # One counter for all tasks together.
            share = [sum(counted[0]) / 2 / self.jobs.count("worker")] * 2
            counted = [share if job == "worker" else [0.0, 0.0] for job in self.jobs]
        uplinks = [wire.traffic(hosts["counters"], uplink)[1] for uplink in hosts["uplinks"]]
        return {
            "uplinks": uplinks,
            "sent": [sent for sent, _ in counted],
            "received": [received for _, received in counted],
            "processor": [_processor_ms(pid) for pid in hosts["pids"]],
        }

    def by_job(self, before, after, steps):
        """Costs of a step between two times, as means over each job's hosts."""
        figures = {}
        if before["uplinks"]:
            # Of the rack that sends most.
            changes = zip(before["uplinks"], after["uplinks"])
            figures["uplink"] = max((b - a) / steps for a, b in changes)
        for what in before.keys() - {"uplinks"}:
            change = [(b - a) / steps for a, b in zip(before[what], after[what])]
            for name in dict.fromkeys(self.jobs):
                of_job = [value for value, owner in zip(change, self.jobs) if owner == name]
                figures.setdefault(what, {})[name] = statistics.fmean(of_job)
        return figures


class Meter:
    """Notes when windows of steps end, phase by phase, and prints each phase's figures.

    Args:
        leader: `Leader`; None in the other tasks, which only say that they have begun.
        rank: This task's.
        plan: Dict with `name`, `window` (steps of each worker that are timed together),
            `together` (of these, steps that the library is told to take in one go), `start`
            (windows before all phases) and `phases`: dicts with `rate`, `warmup` and `windows`.
        counted: Function that returns the bytes that the library itself has counted; None if it
            counts none.
    """

    def __init__(self, leader, rank, plan, counted=None):
        self._leader, self._rank, self._plan, self._counted = leader, rank, plan, counted
        self._phases = iter(plan["phases"])
        self._phase, self._left, self._begun = None, plan["start"], False

    def window_ended(self):
        """Notes that a window has ended."""
        now = time.perf_counter()
        if not self._begun:
            handshake.ready(os.environ["LAB_FOLDER"], self._rank)
            self._begun = True
        if self._leader is None:
            return
        if self._phase is not None and self._left <= self._phase["windows"]:
            self._times.append(1000 * (now - self._last) / self._plan["window"])
        self._left -= 1
        if self._left == 0:
            if self._phase is not None:
                self._report()
            else:
                self._leader.wait_for_others()
            self._next_phase()
        if self._phase is not None and self._left == self._phase["windows"]:
            self._times, self._before = [], self._now()
        self._last = time.perf_counter()

    def _next_phase(self):
        self._phase = next(self._phases, None)
        if self._phase is None:
            self._left = float("inf")
            return
        self._leader.set_rate(self._phase["rate"])
        self._left = self._phase["warmup"] + self._phase["windows"]

    def _now(self):
        return self._leader.now(), self._counted() if self._counted else None

    def _report(self):
        before, after = self._before, self._now()
        steps = self._phase["windows"] * self._plan["window"]
        figures = self._leader.by_job(before[0], after[0], steps)
        if self._counted:
            figures["counted"] = (after[1] - before[1]) / steps
        figures["times"] = [round(ms, 3) for ms in self._times]
        figures |= {"work": self._plan["name"], "rate": self._phase["rate"]}
        print("\n" + RESULT + json.dumps(figures), flush=True)


def windows(plan):
    """Windows of a plan, in all."""
    return plan["start"] + sum(phase["warmup"] + phase["windows"] for phase in plan["phases"])


def _processor_ms(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
