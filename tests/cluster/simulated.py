"""Clusters of simulated processes, by a clock that nobody waits for."""

import dataclasses
import signal

from keras_psplus.cluster import processes
from keras_psplus.cluster.launcher import task_ends
from keras_psplus.cluster.processes import LocalCluster
from tests.support.clock import LONG, Clock

# Seconds between two looks of the launcher.
POLL = 0.5


@dataclasses.dataclass
class Life:
    """A process of a task.

    Attributes:
        seconds: How long it runs if nobody ends it.
        code: Its exit code then, negative for a signal.
        at_sigterm: After how many seconds SIGTERM ends it, with which code; None if it ignores it.
    """

    seconds: float = LONG
    code: int = 0
    at_sigterm: tuple[float, int] | None = (0.0, -signal.SIGTERM)


class Processes:
    """In the place of `TaskProcesses`: each start of a task has its next life, or its last again.

    Args:
        lives: Dict from tasks to lists of their lives; the others live on.

    Attributes:
        starts: Names of the tasks that were started, and how often job or task were before.
        signals: Names of tasks, and the signals that were sent to them.
    """

    def __init__(self, clock, lives, log_dir):
        self._clock, self._lives, self._log_dir = clock, lives, log_dir
        self.starts, self.signals, self.closed, self.is_released = [], [], [], False
        self._ends = {}  # When each ends, and with which code.
        self._current, self.unwritten, self.log_starts = {}, {}, {}

    def __iter__(self):
        return iter(self._current)

    def __contains__(self, name):
        return name in self._current

    @property
    def pids(self):
        return dict.fromkeys(self._current, 2**22 + 1)

    def log_path(self, name):
        return self._log_dir / f"{name}.log"

    def start(self, rank, name, environ, start, has_input):
        assert name not in self._current or self.exit_code(name) is not None, f"{name} runs"
        lives = self._lives.setdefault(name, [Life()])
        self._current[name] = life = lives.pop(0) if len(lives) > 1 else lives[0]
        self._ends[name] = self._clock.now + life.seconds, life.code
        self.starts.append((name, start))
        return self.pids[name]

    def exit_code(self, name):
        when, code = self._ends[name]
        return code if when <= self._clock.now else None

    def signal(self, names, number, to_children=True):
        for name in names:
            self.signals.append((name, number))
            seconds, code = 0.0, -number
            if number == signal.SIGTERM:
                seconds, code = self._current[name].at_sigterm or (LONG, 0)
            if self._clock.now + seconds < self._ends[name][0]:
                self._ends[name] = self._clock.now + seconds, code

    def close_input(self, name):
        self.closed.append(name)

    def kill(self):
        self.signal(list(self._current), signal.SIGKILL)

    def release(self, may_leave):
        assert all(self.exit_code(name) is not None for name in self._current)
        self.is_released = True


class Launcher:
    """Runs jobs of simulated processes.

    Attributes:
        clock: The `Clock`.
        lines: What the launcher has said.
        processes: `Processes` of each start of the job.
    """

    def __init__(self, monkeypatch, folder):
        self.clock = Clock(processes, processes, task_ends, task_ends, monkeypatch=monkeypatch)
        self.lines, self.processes, self._folder = [], [], folder
        self._patch = monkeypatch
        monkeypatch.setattr(processes, "_POLL", POLL)

    def note(self, line):
        self.lines.append(line)

    def cluster(self, lives, restart=0, **options):
        """A `LocalCluster`; `lives` as of `Processes`."""

        def make(argv, log_dir, *others):
            self.processes.append(Processes(self.clock, lives, log_dir))
            return self.processes[-1]

        self._patch.setattr(processes, "TaskProcesses", make)
        options = {"console": self, "log_dir": self._folder, "restart": restart} | options
        return LocalCluster(["the command"], **options)

    def run(self, lives, timeout=None, **options):
        """The end of a cluster, and the seconds until then."""
        began = self.clock.now
        with self.cluster(_copy(lives), **options) as cluster:
            result = cluster.wait(timeout)
        return result, self.clock.now - began

    def run_job(self, lives, max_restarts, tasks_alone=True, **options):
        """The end of a job that is started again, and the numbers of its starts."""
        numbers, lives = [], _copy(lives)

        def make(restart):
            numbers.append(restart)
            alone = max_restarts - restart if tasks_alone else 0
            return self.cluster(lives, restart, task_restarts=alone, **options)

        result = processes.run(make, max_restarts, None, self.note, self.clock.sleep)
        return result, numbers


def _copy(lives):
    return {name: list(starts) for name, starts in lives.items()}
