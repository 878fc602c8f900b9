"""One job on a lab's hosts: a command per host, each on one core."""

import json
import os
import pathlib
import subprocess
import tempfile
import time

from keras_psplus.cluster.environment import python_path
from lab import handshake, meter, wire

_BENCHMARKS = str(pathlib.Path(__file__).parents[1])
_POLL_SECONDS = 0.02
_TAIL_LINES = 25


def run(lab, commands, timeout, leader):
    """Runs a command on each host until the leading task reports completion.

    Args:
        lab: `netlab.Lab` or `loopback.Loopback`.
        commands: A list of arguments for each host.
        timeout: Seconds for all of it.
        leader: Rank of the task that leads. The others are ended with it.

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
            # For methods that are told along which path to send.
            "LAB_RACKS": json.dumps([lab.rack(rank) for rank in range(len(commands))]),
            "PYTHONPATH": os.pathsep.join([_BENCHMARKS, python_path()]),
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
            "uplinks": list(lab.uplinks),
            "pids": [process.pid for process in processes],  # whose processor time is read
        }
        pathlib.Path(folder, "hosts").write_text(json.dumps(hosts))
        try:
            failed, what = _watch(lab, folder, processes, leader, timeout)
        finally:  # Whatever still runs writes into the folder.
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        results = _results(logs[leader])
        if failed is None:
            return results, None
        lines = logs[failed].read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return results, "\n".join([*lines, f"task {failed}: {what}"])


def _watch(lab, folder, processes, leader, timeout):
    """Answers the leader until completion; else returns a task's rank and its error."""
    asked, end = 0, time.monotonic() + timeout
    while not handshake.is_done(folder):
        for rank, process in enumerate(processes):
            code = process.poll()
            if code or code is not None and rank == leader and not handshake.is_done(folder):
                return rank, f"exit code {code}"
        if time.monotonic() > end:
            return leader, f"not done in {timeout:g} s"
        asked += handshake.answer(folder, asked, lambda rate: lab.set_rate(wire.parse_rate(rate)))
        time.sleep(_POLL_SECONDS)
    return None, None


def _results(log):
    lines = log.read_text(errors="replace").splitlines()
    return [
        json.loads(line.removeprefix(meter.RESULT))
        for line in lines
        if line.startswith(meter.RESULT)
    ]
