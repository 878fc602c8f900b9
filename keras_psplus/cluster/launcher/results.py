"""Result of a local cluster: exit codes, logs, and the first failure."""

import dataclasses
import functools
import os
import pathlib
import subprocess

TIMED_OUT = 124  # as timeout(1)
# Of a script that is called with arguments it does not know, by argparse and by Python itself.
WRONG_COMMAND_LINE = 2


class OutOfMemory(int):
    """The exit code of a process that the kernel has ended for want of memory."""


@dataclasses.dataclass
class ClusterResult:
    """The end of a local cluster.

    Args:
        exit_codes: Dict from task name to exit code, negative for a signal.
        log_paths: Dict from task name to the path of its log.
        first_failure: Name of the task that failed first, or `None`.
        terminated: Names of the tasks that did not end by themselves.
        timed_out: Whether the time-out ended the cluster.
        signal: Number of the signal that ended the cluster, or `None`.
        chief_has_ended_well: Whether the chief of workers that serve it has,
            which is the end of the training.
        log_starts: Dict from task name to the bytes that its log had before, of
            earlier attempts at the job.
        unwritten: Dict from task name to the end of its output, for logs that
            could not be written, as on a full disk.
        task_restarts: How often tasks were started again by themselves.
    """

    exit_codes: dict[str, int]
    log_paths: dict[str, pathlib.Path]
    first_failure: str | None = None
    terminated: tuple[str, ...] = ()
    timed_out: bool = False
    signal: int | None = None
    chief_has_ended_well: bool = False
    log_starts: dict[str, int] = dataclasses.field(default_factory=dict)
    unwritten: dict[str, str] = dataclasses.field(default_factory=dict)
    task_restarts: int = 0

    @property
    def exit_code(self) -> int:
        """The exit code for the whole, in the shell's terms: 0 if all went well."""
        if self.signal is not None:
            return 128 + self.signal
        if self.first_failure is not None:
            code = self.exit_codes[self.first_failure]
            is_worker = self.first_failure.startswith("worker-")
            if self.chief_has_ended_well and is_worker and code < 0:
                return 0  # It was killed, and the chief has done without it.
            return code if code > 0 else 128 - code
        return TIMED_OUT if self.timed_out else 0

    @functools.cached_property
    def logs(self) -> dict[str, str]:
        """Dict from task name to everything it wrote."""
        return {
            name: path.read_bytes()[self.log_starts.get(name, 0) :].decode(errors="replace")
            + self.unwritten.get(name, "")
            for name, path in self.log_paths.items()
        }

    def tails(self, lines: int = 40) -> str:
        """Returns the last lines of every task's log as one text, the first failure last."""
        names = sorted(self.log_paths, key=lambda name: name == self.first_failure)
        return "\n".join(self._tail(name, lines) for name in names)

    def _tail(self, name: str, lines: int) -> str:
        text = self.logs[name].splitlines()
        left_out = len(text) - lines
        head = [f"... ({left_out} lines before)"] if left_out > 0 else []
        body = "\n".join(head + text[-lines:]) or "(no output)"
        return f"--- {name}: {self.how_ended(name)} ---\n{body}"

    @property
    def how_it_failed(self) -> str:
        """Describes the end of the first task to fail, e.g. `"exit code 1"`."""
        assert self.first_failure is not None
        return describe(self.exit_codes[self.first_failure])

    def how_ended(self, name: str) -> str:
        """Describes a task's end, e.g. `"exit code 1, first to fail"`."""
        code = self.exit_codes.get(name)
        text = "not started" if code is None else describe(code)
        if name in self.terminated:
            text += " (still running, terminated by the launcher)"
        return text + (", first to fail" if name == self.first_failure else "")


def describe(code: int) -> str:
    """Describes a process's end, e.g. `"exit code 1"`."""
    if isinstance(code, OutOfMemory):
        return f"ended by signal {-code}, by the kernel for want of memory"
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def exit_code_of(process: subprocess.Popen[bytes]) -> int | None:
    """A process's exit code without reaping it; None while it runs."""
    if process.returncode is not None:
        return process.returncode
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
