"""One job on the hosts of a lab: a command for each host, each on one processor core."""

import json
import os
import pathlib
import subprocess
import tempfile
import time

_POLL_SECONDS = 0.1


def run(lab, commands, timeout, trainers=None, env=None):
    """Runs a command on each host, and returns what those that train have printed as their result.

    Args:
        lab: `netlab.Lab`.
        commands: A list of arguments for each host, of anything that `str` takes.
        timeout: Seconds for all of it.
        trainers: Ranks of those that end by themselves and print `result: ` and JSON; None for
            all. The others are ended with the lab.
        env: Dict of further environment variables.

    Raises:
        RuntimeError: If one fails, or not all trainers are done after `timeout` seconds.
    """
    cores = sorted(os.sched_getaffinity(0))
    trainers = range(len(commands)) if trainers is None else trainers
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",
        "NETLAB_COUNTERS": lab.counters,
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(rank)) for rank in range(len(commands))]
        pids = pathlib.Path(folder, "pids")
        environment["NETLAB_PIDS"] = str(pids)  # Whose processor time a task may read.
        processes = []
        for rank, (command, log) in enumerate(zip(commands, logs)):
            with log.open("w") as file:
                processes.append(
                    lab.start(
                        rank,
                        list(map(str, command)),
                        core=cores[rank % len(cores)],
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        pids.write_text(json.dumps([process.pid for process in processes]))
        end = time.monotonic() + timeout
        while any(processes[rank].poll() is None for rank in trainers):
            if any(process.poll() for process in processes) or time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        codes = [process.poll() for process in processes]
        if any(codes) or None in [codes[rank] for rank in trainers]:
            tails = "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
            raise RuntimeError(f"{tails}\nReceived: exit codes {codes} of {commands[0]}")
        return [_result(logs[rank]) for rank in trainers]


def _result(log):
    line = [line for line in log.read_text().splitlines() if line.startswith("result: ")][0]
    return json.loads(line.removeprefix("result: "))
