"""`keras-psplus remote-task`: one task of `keras-psplus run --hosts`, on its host.

The launcher starts it by ssh (`keras_psplus.cluster.launcher.remote`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_psplus.cli.flags import UsageError
from keras_psplus.cluster import environment
from keras_psplus.cluster.launcher import remote
from keras_psplus.cluster.launcher.task_ends import (
    KernelKills,
    OutOfMemory,
    ending_with_parent,
    exit_code_of,
)
from keras_psplus.cluster.process.left_processes import LeftProcesses

_POLL_SECONDS = 0.1
_LARGEST_FILE = 16 << 20


def main(argv: list[str]) -> int:
    """Runs the command; returns the script's exit code, 128 + n for signal n."""
    try:
        request = remote.read_line(sys.stdin.buffer)
    except ValueError:
        raise UsageError(
            "`keras-psplus run --hosts` starts this command, and tells it by its standard input "
            f"what to do. Received: {' '.join(argv) or 'no task'}"
        ) from None
    mirror = _Mirror(request["mirrored"])
    try:
        return _run(request, mirror)
    finally:
        mirror.close()


def _run(request: dict[str, Any], mirror: _Mirror) -> int:
    environ = {**os.environ, **request["environ"], **mirror.environment}
    environ |= environment.share_of_host(
        request["counts"],
        tuple(request["place"]),
        environ,
        request["has_ps"],
        request["gpus_per_worker"],
    )
    left, kills = LeftProcesses(), KernelKills()
    # Before the script writes anything, or its first lines would come from what was not started.
    is_cut = not mirror.say({"started": True})
    process = subprocess.Popen(
        ending_with_parent([sys.executable, *request["argv"]]),
        stdin=subprocess.PIPE if request["has_input"] else subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env={**environ, **left.environment},
        start_new_session=True,
    )
    left.add(process.pid)
    launcher = _Launcher()
    try:
        while (code := exit_code_of(process)) is None and not is_cut:
            is_cut = not (launcher.hear(process) and mirror.send())
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        left.end(may_stay=False)
        process.wait()
    code = process.returncode if code is None else kills.named(code)
    if isinstance(code, OutOfMemory):
        print("keras-psplus: the kernel has ended this task for want of memory", flush=True)
    mirror.send()
    mirror.say({"ended": int(code)})
    return 128 - code if code < 0 else code


class _Launcher:
    """Messages of the launcher, on standard input."""

    def __init__(self) -> None:
        self._heard_at, self._rest = time.monotonic(), b""

    def hear(self, process: subprocess.Popen[bytes]) -> bool:
        """Does for a moment what it says; returns whether it is still there."""
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            return time.monotonic() - self._heard_at < remote.SILENCE_SECONDS
        data = os.read(0, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._heard_at = time.monotonic()
        for line in lines:
            name, *words = line.decode().split() or [""]
            if name == "close" and process.stdin is not None:
                process.stdin.close()
            elif name == "signal":
                send = os.killpg if words[1] == "1" else os.kill
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(process.pid, int(words[0]))
        return bool(data)


class _Mirror:
    """Files that the task writes for the launcher, on this host: sent as they change.

    Attributes:
        environment: Dict of the variables by which the task finds them.
    """

    def __init__(self, variables: Sequence[str]) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="keras_psplus_remote_"))
        self._seen: dict[pathlib.Path, tuple[int, int]] = {}
        self.environment: dict[str, str] = {}
        for name in variables:
            path = self._folder / name
            path.mkdir()
            is_folder = name in remote.FOLDERS
            self.environment[name] = str(path if is_folder else path / "log")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self) -> bool:
        """Sends what has changed; returns whether the launcher is there."""
        for name in self.environment:
            for path in sorted((self._folder / name).iterdir()):
                # Others are about to take another's place.
                if not path.name.startswith(".") and not self._send_file(name, path):
                    return False
        return True

    def _send_file(self, name: str, path: pathlib.Path) -> bool:
        try:
            found = path.stat()
            state = found.st_mtime_ns, found.st_size
            if self._seen.get(path) == state or found.st_size > _LARGEST_FILE:
                return True
            with open(path, "rb") as file:
                if name not in remote.FOLDERS:
                    # It grows by whole lines.
                    file.seek(self._seen.get(path, (0, 0))[1])
                    data = file.read(found.st_size - file.tell())
                else:
                    data = file.read()
        except OSError:
            return True  # It is gone.
        self._seen[path] = state
        return self.say({"of": name, "file": path.name, "text": data.decode(errors="replace")})

    @staticmethod
    def say(what: Mapping[str, Any]) -> bool:
        """Sends a message; returns whether somebody takes it."""
        try:
            sys.stderr.write(f"{remote.MARK}{json.dumps(what)}\n")
            sys.stderr.flush()
        except OSError:
            return False
        return True
