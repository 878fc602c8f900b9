"""`make demo`: trains digits.py in one process, then on local clusters, and compares.

The clusters are two workers that all-reduce their gradients, and two workers with a parameter
server that each update it without waiting for the other. All runs have one batch size and the same
machine: the one process has all of its cores, the clusters share them.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

SCRIPT = pathlib.Path(__file__).with_name("digits.py")
RESULT = re.compile(r"digits: (accuracy=.*)")


def run(title, command, timeout):
    """Runs a command, shows its output as it comes, and returns the script's result line."""
    print(f"\n--- {title}\n$ {' '.join(command)}", flush=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("TF_CONFIG", None)  # One process is to be one; the launcher writes its own.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # So that the launcher and its tasks can be ended together.
    )
    watchdog = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGTERM))
    watchdog.start()
    result = None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if match := RESULT.search(line):
                result = {k: float(v) for k, v in (pair.split("=") for pair in match[1].split())}
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        watchdog.cancel()
    if code != 0 or result is None:
        sys.exit(f"{title} failed. Received: exit code {code}, result {result}")
    return result


def summary(title, result):
    steady = result["after_first_epoch"]
    return (
        f"{title:<15} accuracy {result['accuracy']:.3f}   {result['seconds']:6.1f} s of training"
        f"   {steady:6.1f} s without the first epoch"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run")
    parser.add_argument("--verbose", action="store_true", help="what TensorFlow says of itself")
    args = parser.parse_args()

    script = [os.path.relpath(SCRIPT), "--epochs", str(args.epochs)]
    launcher = [sys.executable, "-m", "keras_psplus", "run"] + ["--verbose"] * args.verbose
    single = ["--workers", "1", "--strategy", "single"]
    one = run("one process", [*launcher, *single, *script], args.timeout)
    many = run(
        f"{args.workers} workers",
        [*launcher, "--workers", str(args.workers), *script],
        args.timeout,
    )
    title = f"{args.workers} workers, 1 ps"
    cluster = ["--workers", str(args.workers), "--ps", "1", "--strategy", "async_parameter_server"]
    served = run(f"{title}, asynchronous", [*launcher, *cluster, *script], args.timeout)
    for result in (many, served):
        if result["workers"] != args.workers:
            sys.exit(f"The cluster did not train together. Received: {result}")
    print()
    print(summary("one process", one))
    print(summary(f"{args.workers} workers", many))
    print(summary(title, served), flush=True)


if __name__ == "__main__":
    main()
