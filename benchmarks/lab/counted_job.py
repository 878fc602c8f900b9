"""Jobs whose bytes the kernel counts on a loopback that nobody else uses."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

_INTERFACES = pathlib.Path("/proc/net/dev")  # those of one's own namespace
_RESULT = "result: "


def loopback_bytes():
    """Bytes that the loopback has carried, of all tasks together."""
    lines = _INTERFACES.read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split()[9])


def add_flags(parser, timeout):
    """Adds `--timeout` and the hidden flag of `move_into_own_network`."""
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for each job")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def move_into_own_network(args):
    """As root, runs this program again in its own network namespace, and ends."""
    if os.getuid() == 0 and not args.inside:
        command = ["unshare", "--net", sys.executable, *sys.argv, "--inside"]
        sys.exit(subprocess.run(command).returncode)
    if args.inside:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def print_result(result):
    """Has a task say what `launch` is to return."""
    print(_RESULT + json.dumps(result), flush=True)


def launch(script, workers, ps, timeout, chief=False, **environment):
    """Runs a script in all tasks of a cluster; returns the result of the first."""
    from keras_psplus.cluster.processes import LocalCluster

    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(
            [sys.executable, script], workers, ps, chief=chief, env=environment, log_dir=folder
        )
        with cluster:
            end = cluster.wait(timeout)
        if end.exit_code != 0:
            raise RuntimeError(f"{end.tails()}\nReceived: exit code {end.exit_code}")
        lines = end.logs["chief-0" if chief else "worker-0"].splitlines()
    (line,) = [line for line in lines if line.startswith(_RESULT)]
    return json.loads(line.removeprefix(_RESULT))
