"""`make demo`: trains digits.py in one process, then on local clusters, and compares.

The clusters are two workers that all-reduce their gradients, and two workers with a parameter
server that each update it without waiting for the other. All runs have the same batches in the same
order, and the same machine: the one process has all of its cores, the clusters share them. Workers
that all-reduce have the losses of one process; those of the asynchronous ones are their own.
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
LOSSES = re.compile(r"digits: losses (.*)")
RESULT = re.compile(r"digits: (accuracy=.*)")


def run(title, command, timeout):
    """Runs a command, shows its output as it comes, and returns the script's results."""
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
    losses, result = None, None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if match := LOSSES.search(line):
                losses = [float(loss) for loss in match[1].split()]
            if match := RESULT.search(line):
                result = {k: float(v) for k, v in (pair.split("=") for pair in match[1].split())}
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        watchdog.cancel()
    if code != 0 or losses is None or result is None:
        sys.exit(f"{title} failed. Received: exit code {code}, result {result}")
    return {**result, "losses": losses}


def summary(results):
    """Lines of a table: each run's losses, accuracy and seconds."""
    epochs = len(next(iter(results.values()))["losses"])
    shown = sorted({1, 2, epochs} & set(range(1, epochs + 1)))
    heads = "".join(f"{f'epoch {epoch}':>10}" for epoch in shown)
    yield f"{'loss of':<18}{heads}   accuracy   seconds   without the first epoch"
    for title, result in results.items():
        losses = "".join(f"{result['losses'][epoch - 1]:10.5f}" for epoch in shown)
        times = f"{result['seconds']:8.1f}{result['after_first_epoch']:20.1f}"
        yield f"{title:<18}{losses}{result['accuracy']:11.3f}{times}"


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
    print(
        *["", *summary({"one process": one, f"{args.workers} workers": many, title: served})],
        sep="\n",
    )
    print(
        f"{args.workers} workers that all-reduce take the steps of one process: their sums have"
        " another order, and nothing else differs.\n"
        "Those of the parameter server do not wait for one another, and train another way.",
        flush=True,
    )


if __name__ == "__main__":
    main()
