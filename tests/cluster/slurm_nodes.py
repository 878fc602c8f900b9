"""A Slurm cluster on this machine: a controller and two nodes, each with a network of its own.

Their names are known in a mount namespace alone, whose /etc/hosts has them. Nothing of this
machine's is changed, and all of it ends with the context.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time

from tests.lab import netlab

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare", "nsenter")
_CONF = """
ClusterName=test
SlurmctldHost={host}({hosts[0]})
SlurmctldPort=6817
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=3
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr={hosts[1]} Port=6818 CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr={hosts[2]} Port=6818 CPUs=8
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Why there can be no such cluster here; None if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurm-wlm munge"
    return netlab.why_not()


class Slurm:
    """Context in which the cluster runs.

    Args:
        folder: Where its files go.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self._lab = netlab.Lab(3)
        self._started = []

    def __enter__(self):
        host = socket.gethostname().partition(".")[0]
        for name in ("state", "spool-n1", "spool-n2", "munge"):
            (self.folder / name).mkdir(mode=0o755)
        self._lab.__enter__()
        hosts = [address.partition(":")[0] for address in self._lab.addresses]
        conf = _CONF.format(host=host, folder=self.folder, hosts=hosts)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text("")
        names = f"127.0.0.1 localhost\n{hosts[0]} {host}\n{hosts[1]} n1\n{hosts[2]} n2\n"
        (self.folder / "hosts").write_text(names)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        try:
            self._start(
                ["unshare", "--mount", "sh", "-c"],
                f"mount --bind {self.folder}/hosts /etc/hosts && echo in && exec sleep 100000",
                wait_for="in",
            )
            munge = self.folder / "munge"
            options = {
                "socket": "socket",
                "key-file": "key",
                "pid-file": "pid",
                "log-file": "log",
                "seed-file": "seed",
            }
            self._start(
                [
                    *self._inside("munged", "--force", "--foreground"),
                    *(f"--{option}={munge / file}" for option, file in options.items()),
                ]
            )
            _wait(lambda: (munge / "socket").exists(), "munged")
            self._start(self._inside("slurmctld", "-D", "-c"))
            for rank, node in enumerate(("n1", "n2"), 1):
                self._start(self._inside("slurmd", "-D", "-N", node, rank=rank))
            _wait(
                lambda: self.run("sinfo", "-h", "-N", "-t", "idle", check=False).count("idle") == 2,
                "two idle nodes",
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        os.environ.pop("SLURM_CONF", None)
        for process in reversed(self._started):
            process.terminate()
        for process in reversed(self._started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._lab.__exit__()

    def run(self, *command, check=True, timeout=60, **env):
        """Runs a command of Slurm, and returns its output."""
        ran = subprocess.run(
            self._inside(*command), stdout=subprocess.PIPE, timeout=timeout, **self._given(env)
        )
        if check and ran.returncode:
            logs = "\n".join(
                f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log")
            )
            raise AssertionError(
                f"{command} ended with {ran.returncode}:\n{ran.stdout[-20000:]}\n{logs}"
            )
        return ran.stdout

    def start(self, *command, stdout, **env):
        """Starts a command of Slurm, which ends with the cluster at the latest."""
        process = subprocess.Popen(self._inside(*command), stdout=stdout, **self._given(env))
        self._started.append(process)
        return process

    def _given(self, env):
        return {
            "stderr": subprocess.STDOUT,
            "text": True,
            "env": {**self._lab.environment(os.environ), **env},
            "cwd": self.folder,
        }

    def _inside(self, *command, rank=0):
        mount = f"--mount=/proc/{self._started[0].pid}/ns/mnt"
        return [*self._lab.inside(rank), "nsenter", mount, "--", *command]

    def _start(self, command, *more, wait_for=None):
        process = subprocess.Popen(
            [*command, *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if wait_for else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
        )
        self._started.append(process)
        if wait_for:
            assert process.stdout.readline().strip() == wait_for
        return process


def _wait(holds, what, seconds=30):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"Slurm: no {what} after {seconds} s"
        time.sleep(0.2)
