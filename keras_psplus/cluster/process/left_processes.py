"""Ends processes that the tasks of a cluster have left.

A task ends with its launcher, and its process group with it; processes in a session of their own,
and those of a task whose launcher was killed, would stay. So the launcher starts this program,
`left_processes.py MARK`, and tells it by its standard input which tasks there are: `+PID`, `-PID`
for one whose id may be another process's from then on, and in the end `leave` if what the tasks
have left may stay. At the end of its input it kills what is in a task's session or has the mark in
its environment. Linux only.
"""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterator
from typing import IO

VARIABLE = "KERAS_PSPLUS_STARTED_BY"
_SECONDS = 5.0


class LeftProcesses:
    """Program that ends what tasks have left, as their launcher sees it.

    Attributes:
        environment: Variables by which it finds what a task has started.
    """

    def __init__(self) -> None:
        self.environment = {VARIABLE: uuid.uuid4().hex}
        self._process: subprocess.Popen[str] | None = None

    def add(self, pid: int) -> None:
        """Notes that a task was started, the leader of a session."""
        if sys.platform != "linux":
            return
        if self._process is None:
            command = [
                sys.executable,
                "-I",
                "-S",
                __file__,
                f"{VARIABLE}={self.environment[VARIABLE]}",
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, text=True, start_new_session=True
            )
        self._say(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Notes that a task's id may be that of another process from now on."""
        self._say(f"-{pid}")

    def end(self, may_stay: bool) -> None:
        """Ends what is left of the tasks, which have ended.

        Args:
            may_stay: Whether nothing is ended, as the job has ended well.
        """
        if self._process is None:
            return
        if may_stay:
            self._say("leave")
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _say(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()
            except OSError:
                pass  # It was killed.


def _left(mark: bytes, sessions: Collection[int]) -> Iterator[int]:
    """Ids of the processes that are in a session, or have the mark."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ, open(f"/proc/{name}/stat") as stat:
                has_mark = mark in environ.read().split(b"\0")
                session = int(stat.read().rpartition(")")[2].split()[3])
        except OSError:
            continue  # It has ended, or is another user's.
        if has_mark or session in sessions:
            yield int(name)


def _main(mark: str, told: IO[str]) -> None:
    sessions = set[int]()
    for line in told:
        if line == "leave\n":
            return
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    # A second look finds processes that were started meanwhile.
    for _ in range(2):
        for pid in _left(mark.encode(), sessions):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


if __name__ == "__main__":
    _main(sys.argv[1], sys.stdin)
