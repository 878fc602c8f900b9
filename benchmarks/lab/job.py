"""One job on the hosts of a lab: a command for each host, each on one processor core."""

import json
import os
import pathlib
import subprocess
import tempfile
import time

from keras_psplus.cluster.environment import python_path
from lab import handshake, meter, netlab

_BENCHMARKS = str(pathlib.Path(__file__).parents[1])
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
_TAIL_LINES = 25


def run(lab, commands, timeout, leader, env=None):
    """Runs a command on each host until the task that leads says that all is done.

    Args:
        lab: `netlab.Lab` or `netlab.Loopback`.
        commands: A list of arguments for each host.
        timeout: Seconds for all of it.
        leader: Rank of the task that leads. The processes end with the lab.
        env: Dict of further environment variables.

    Returns:
        The list of what the leader has printed as results (see `meter.RESULT`), and the error:
        None, or the end of a log and what happened.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            # TensorFlow's servers look nowhere else. With a single thread between operations, one
            # that waits for a peer would hold up all others.
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "2",
            "GLOO_SOCKET_IFNAME": lab.interface,
            "LAB_FOLDER": folder,
            "PYTHONPATH": os.pathsep.join([_BENCHMARKS, python_path()]),
            **(env or {}),
        }
        logs = [pathlib.Path(folder, f"log-{rank}") for rank in range(len(commands))]
        processes = []
        for rank, (command, log) in enumerate(zip(commands, logs)):
            with log.open("w") as file:
                process = lab.start(
                    rank,
                    list(map(str, command)),
                    core=cores[rank % len(cores)],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        hosts = {
            "counters": lab.counters,
            "devices": [lab.device(rank) for rank in range(len(commands))],
            "pids": [process.pid for process in processes],  # whose processor time is read
        }
        pathlib.Path(folder, "hosts").write_text(json.dumps(hosts))
        timed_out = _watch(lab, folder, processes, leader, time.monotonic() + timeout)
        results = _results(logs[leader])
        if handshake.is_done(folder):
            return results, None
        codes = [process.poll() for process in processes]
        shown = next((rank for rank, code in enumerate(codes) if code), leader)
        what = f"task {shown}: exit code {codes[shown]}"
        if timed_out:
            what = f"task {shown}: not done in {timeout:g} s"
        lines = logs[shown].read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return results, "\n".join([*lines, what])


def _watch(lab, folder, processes, leader, end):
    """Waits until all is done or a task has ended too soon; whether time was up before."""
    asked = 0
    while not handshake.is_done(folder):
        if any(process.poll() for process in processes) or processes[leader].poll() is not None:
            # What a task leaves behind when it fails may take the others with it.
            time.sleep(_GRACE_SECONDS)
            return False
        if time.monotonic() > end:
            return True
        asked += handshake.answer(folder, asked, lambda rate: lab.set_rate(netlab.parse_rate(rate)))
        time.sleep(_POLL_SECONDS)
    return False


def _results(log):
    lines = log.read_text(errors="replace").splitlines()
    return [
        json.loads(line.removeprefix(meter.RESULT))
        for line in lines
        if line.startswith(meter.RESULT)
    ]
