"""Random kills while workers join and leave a job: every step counts, and the job ends.

elastic_trials.py [--first N] [--count N]

A trial's number draws what its job does and what happens to its workers. To be run by hand; the
suite has some of the trials.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from keras_psplus.cluster.launcher.task_ends import ADD_WORKER
from keras_psplus.cluster.monitor import job
from keras_psplus.cluster.monitor.job import JobRecord
from keras_psplus.cluster.processes import LocalCluster
from tests import warm
from tests.support.jobs import environment

JOB = pathlib.Path(__file__).with_name("elastic_job.py")
LAYOUT = {"workers": 3, "ps": 1, "chief": True}
MIN_WORKERS, EVENTS = 1, 8
JOBS = (
    *([], ["int8"], ["workers_read"], ["overlap"], ["sync"]),
    *(["int8", "backup"], ["workers_read", "int8"], ["overlap", "workers_read"]),
)
STEPS, ROWS = 60, 240  # of an epoch
_SECONDS = 120
# Whole lines: the log is read while it is written.
_EPOCH = re.compile(r"^epoch (.*)\n", re.MULTILINE)


@dataclasses.dataclass
class Outcome:
    """The end of a trial.

    Attributes:
        did: What was done to the job, a word for each event.
        kills: How many workers were killed.
        exit_code: That of the job; None if it did not end in time.
        epochs: For each epoch, rows in training and in validation, and steps by worker.
        counted: Epochs, steps on the server, iterations of the optimizer, and how far weights are
            off those of one process.
        text: Lines of the launcher, and ends of the tasks' logs.
    """

    did: list[str]
    kills: int
    exit_code: int | None
    epochs: list
    counted: list
    text: str

    def problems(self, options):
        """What is wrong, as list of texts.

        Args:
            options: What the job was told.
        """
        is_sync = "sync" in options
        # Steps that a worker has under way are repeated when it is killed.
        at_once = 0 if is_sync else 2 if "overlap" in options else 1
        found = [] if self.exit_code == 0 else [f"exit code {self.exit_code}"]
        for number, (rows, steps) in enumerate(self.epochs):
            # Of a synchronous step, each worker takes a share.
            if rows != [ROWS, ROWS] or sum(steps) < STEPS or (sum(steps) > STEPS and not is_sync):
                found.append(f"epoch {number}: {rows} rows, {steps} steps by worker")
        epochs, steps, iterations, off = self.counted or [0, 0, 0, 0.0]
        if epochs != len(self.epochs) or not epochs:
            found.append(f"{epochs} epochs at the end, {len(self.epochs)} in the log")
        least, most = epochs * STEPS, epochs * STEPS + at_once * self.kills
        counts = [iterations] if is_sync else [steps, iterations]
        if not all(least <= count <= most for count in counts):
            found.append(f"{counts} steps and iterations, not {least} to {most}")
        if off > 1e-5:
            found.append(f"weights are off by {off}")
        if "Traceback" in self.text:
            found.append("an error in a log")
        return found


class Lines(list):
    """A console that keeps the launcher's lines."""

    note = list.append

    def __getattr__(self, name):
        return lambda *args: None


class Trial:
    """A job of one to three workers, and what is done to these.

    Args:
        number: What draws the events.
        options: What the job is told.
    """

    def __init__(self, number, folder, options):
        self.options, self._random = options, random.Random(number)
        self._folder, self._lines, self._did, self._kills = folder, Lines(), [], 0
        self._here, self._result, self._left, self._served = {"worker-0"}, [], 0, 0
        self._record = JobRecord([JOB.name], LAYOUT, folder, min_workers=MIN_WORKERS)
        self._cluster, self._began = None, threading.Event()

    def _launch(self):
        """Runs the job as `keras-psplus run --workers 1:3 --ps 1` does."""
        with self._record:
            self._cluster = LocalCluster(
                [sys.executable, str(JOB), str(self._folder), *self.options],
                **LAYOUT,
                env=environment(**self._record.environment),
                log_dir=self._folder / "logs",
                console=self._lines,
                grace=30.0,
                record=self._record,
                min_workers=MIN_WORKERS,
            )
            with self._cluster:
                self._began.set()
                self._result.append(self._cluster.wait(600))

    def run(self, events):
        """Runs the trial; returns an `Outcome`.

        Args:
            events: Function without arguments that does something to the job.
        """
        thread = threading.Thread(target=self._launch)
        thread.start()
        assert self._began.wait(_SECONDS)
        try:
            self.wait_for("the first epoch", self._epochs)
            events()
        except AssertionError as error:
            self._lines.append(str(error))
            self._result.append(None)
            self._cluster.stop()
        except BaseException:
            self._cluster.stop()
            raise
        thread.join()
        return self._outcome()

    def act_at_random(self, events=EVENTS):
        """Adds, kills and ends workers, and lets the job end."""
        for _ in range(events):
            time.sleep(self._random.uniform(0.1, 1.0))
            self._do(self._random.choice(("add", "add", "kill", "leave", "kill as it comes")))
        self._settle()
        # And some more while it ends.
        self.let_end()
        time.sleep(self._random.uniform(0, 1))
        self._do(self._random.choice(("kill", "leave", "add")))

    def let_end(self):
        """Has the job end with the present epoch."""
        (self._folder / "end").touch()

    def _do(self, what):
        name = None
        if what in ("add", "kill as it comes"):
            name = self.add()
        elif len(self._here) > MIN_WORKERS:
            name = self._random.choice(sorted(self._here))
            self.kill(name) if what == "kill" else self._end(name, signal.SIGTERM)
        if name is not None and what == "kill as it comes":
            self.wait_for(
                f"{name} to serve", lambda: self.log(name).count("serves on") > self._served
            )
            time.sleep(self._random.uniform(0, 1.2))
            self.kill(name)

    def add(self):
        """Adds a worker; returns its name, or None if there are three, some of which may leave."""
        with contextlib.suppress(job.RequestError, FileNotFoundError):
            name = job.ask(self._record.folder, ADD_WORKER, 15)
            self._served = self.log(name).count("serves on")
            self._here.add(name)
            self._did.append(f"+{name[-1]}")
            return name
        return None

    def kill(self, name):
        """Kills a worker."""
        self._end(name, signal.SIGKILL)

    def _end(self, name, number):
        is_kill = number == signal.SIGKILL
        self._here.discard(name)
        self._kills += is_kill
        self._left += 1
        self._did.append(f"{'x' if is_kill else '-'}{name[-1]}")
        self.signal(name, number)

    def _settle(self):
        """Waits until those that were to leave have left, and all others take steps."""
        while len(self._here) < 2:
            self.add() or time.sleep(0.5)
        self.wait_for(
            f"{self._left} workers to leave",
            lambda: sum("has left" in line for line in self._lines) >= self._left,
        )
        self.wait_for_steps(self._here)

    def wait_for_steps(self, names):
        """Waits until some workers have taken steps in an epoch that begins from now on."""
        numbers, first = [int(name[-1]) for name in names], len(self._epochs()) + 1
        self.wait_for(
            f"steps of {sorted(names)}",
            lambda: any(all(steps[n] for n in numbers) for _, steps in self._epochs()[first:]),
        )

    def signal(self, name, number):
        """Sends a signal to a worker."""
        self._cluster.send_signal(name, number, to_children=False)

    def log(self, name="chief-0"):
        """Text that a task has written."""
        path = self._cluster.log_path(name)
        return path.read_text() if path.exists() else ""

    def _epochs(self):
        return [json.loads(text) for text in _EPOCH.findall(self.log())]

    def wait_for(self, what, condition):
        """Waits until a condition holds; raises AssertionError if it does not."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited {_SECONDS} s for {what}"
            assert not self._result, f"ended while it was waited for {what}"
            time.sleep(0.05)

    def _outcome(self):
        result, log = self._result[0], self.log()
        ended = re.search(r"^end (.*)$", log, re.MULTILINE)
        logs = [path.read_text()[-6000:] for path in sorted((self._folder / "logs").glob("*.log"))]
        return Outcome(
            self._did,
            self._kills,
            None if result is None or result.timed_out else result.exit_code,
            self._epochs(),
            json.loads(ended[1]) if ended else [],
            "\n".join([*self._lines, *logs]),
        )


def run(number, folder, events=EVENTS):
    """Runs a trial; returns its `Outcome` and list of what is wrong."""
    trial = Trial(number, folder, JOBS[number % len(JOBS)])
    outcome = trial.run(lambda: trial.act_at_random(events))
    return outcome, outcome.problems(trial.options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--count", type=int, default=30, help="number of trials")
    options = parser.parse_args()
    subprocess.Popen = warm.Popen
    bad = 0
    for number in range(options.first, options.first + options.count):
        with tempfile.TemporaryDirectory(prefix="elastic_") as folder:
            began = time.monotonic()
            outcome, problems = run(number, pathlib.Path(folder))
            bad += bool(problems)
            print(
                f"{number} {'+'.join(JOBS[number % len(JOBS)])}: {' '.join(outcome.did)}; "
                f"{outcome.kills} kills, epochs, steps, iterations, off {outcome.counted}, "
                f"{time.monotonic() - began:.0f} s {problems or 'right'}",
                flush=True,
            )
            if problems:
                print(outcome.text, flush=True)
    print(f"{options.count} trials, {bad} wrong")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
