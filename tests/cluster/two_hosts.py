"""Two hosts with addresses, folders, processes and a name of their own, on one machine.

They are the namespaces of `tests.lab.netlab`. The second is reached by ssh, at OpenSSH's usual
port; what a test lays over a folder or a file is seen there alone. All ends with the context.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

from tests.cluster import sshd
from tests.docs import pages
from tests.lab import netlab

PYTHON = pathlib.Path(sys.executable)
# Rules of a firewall that lets packets to a port vanish, for kernels and images without nftables.
_FIREWALL = (
    "ip rule add pref 100 lookup local",
    "ip rule del pref 0",
    "ip rule add pref 10 iif eth0 ipproto tcp dport {port} blackhole",
)


def why_not():
    """Reason why there cannot be two hosts here, or None."""
    missing = [name for name in ("ssh", "scp", "ssh-keygen", "unshare") if not shutil.which(name)]
    if missing or sshd.program() is None:
        return f"no {', '.join(missing) or 'sshd'} here"
    return netlab.why_not()


class TwoHosts:
    """The hosts.

    Args:
        folder: An empty folder, for what they need.
        overlays: Dict from paths to what lies there on the second host, such as on the folder
            `site`, which is on Python's path on both.
        environ: Dict of variables of the hosts' user; by default this process's Python and library
            are on the paths.
        has_key: Whether the second host knows the user's key.

    Attributes:
        work: The folder in which the user works. On the second host, another has its path.
        work_there: That other one.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, folder, overlays=None, environ=None, has_key=True):
        self.work, self.work_there = folder / "work", folder / "work_there"
        self._folder, self._has_key = folder, has_key
        self._environ = environ or {
            "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{pages.ROOT}:{folder / 'site'}",
            # Others must not find a module compiled that only lies over theirs.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._overlays = {self.work: self.work_there, **(overlays or {})}
        self._lab = netlab.Lab(hosts=2)

    def __enter__(self):
        for path in (self.work, self.work_there, self._folder / "bin", self._folder / "site"):
            path.mkdir(exist_ok=True)
        options = sshd.make_keys(self._folder, 22, self._has_key)
        # The user's own, with settings of their own.
        programs = self._folder / "bin"
        self._write(programs / "ssh", sshd.client(self._folder))
        self._write(programs / "scp", f"{shutil.which('scp')} -S {programs / 'ssh'}")
        with contextlib.ExitStack() as stack:
            self._lab = stack.enter_context(self._lab)
            mounts = [f"mount --bind {new} {old}" for old, new in self._overlays.items()]
            serve = shlex.join([sshd.program(), "-D", "-e", *options])
            spaces = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            line = " && ".join(["hostname second", *mounts, serve])
            log = stack.enter_context(open(self._folder / "sshd.log", "w"))
            # Not in the folder that is about to be another.
            self._lab.start(1, ["unshare", *spaces, "sh", "-c", line], stderr=log, cwd="/")
            self._wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start(self, line, rank=0, **options):
        """Starts a line of a shell on a host, as its user types it."""
        env = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", **self._environ}
        env["PATH"] = f"{self._folder / 'bin'}:{env['PATH']}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        folder = (self.work, self.work_there)[rank]
        line = line.replace("10.0.0.", "10.77.0.")
        return self._lab.start(
            rank,
            ["sh", "-c", line],
            env=env,
            cwd=folder,
            start_new_session=True,
            **pipes,
            **options,
        )

    def run(self, line, rank=0, seconds=200):
        """Runs a line; returns its exit code and what it has printed, with the page's addresses."""
        process = self.start(line, rank)
        out = process.communicate(timeout=seconds)[0]
        return process.returncode, out.replace("10.77.0.", "10.0.0.")

    def close_port(self, port):
        """Has a firewall of the second host drop what comes to a port."""
        for line in _FIREWALL:
            subprocess.run([*self._lab.inside(1), *line.format(port=port).split()], check=True)

    def set_rate(self, bits_per_second):
        """Sets the rate of the hosts' links."""
        self._lab.set_rate(bits_per_second)

    @staticmethod
    def _write(path, command):
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)

    def _wait(self):
        """Returns when the second host's ssh answers, whether it lets the user in or not."""
        reach = [*self._lab.inside(0), "bash", "-c", f"exec 3<>/dev/tcp/{self.addresses[1]}/22"]
        for _ in range(100):
            if subprocess.run(reach, capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError((self._folder / "sshd.log").read_text())
