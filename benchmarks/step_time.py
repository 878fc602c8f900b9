"""Step times of Keras 3 under keras_psplus beside stock Keras 2 (tf_keras), in one run.

    python benchmarks/step_time.py --out step_time.json

Both train the same model on the same batches under a MultiWorkerMirroredStrategy, TensorFlow's own
for tf_keras and keras_psplus's for Keras 3, with workers on this machine's loopback. The two take
turns, so that what else the machine does meets both alike. One process without a strategy is
measured as well: with the whole batch, and with one worker's share of it, which is what a step
costs without communication. Every worker, and the one process, has an equal share of the cores.
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile

from keras_psplus.cluster.processes import LocalCluster

TASK = pathlib.Path(__file__).with_name("step_time_task.py")
LIBRARIES = ("tf_keras", "keras")
TITLES = {"tf_keras": "tf_keras, stock strategy", "keras": "Keras 3, keras_psplus"}
ALONE = {"tf_keras": "tf_keras, one process", "keras": "Keras 3, one process"}


def launch(command, processes, timeout):
    """Runs a command in some processes and returns the first one's results.

    Raises:
        RuntimeError: If a process fails, or is not done after `timeout` seconds.
    """
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as log_dir:
        with LocalCluster(command, processes, env=environment, log_dir=log_dir) as cluster:
            end = cluster.wait(timeout)
        if end.exit_code != 0:
            raise RuntimeError(f"{end.tails()}\nReceived: exit code {end.exit_code}")
        lines = end.logs["worker-0"].splitlines()
    prefix = "result: "
    return [json.loads(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)]


def run(args):
    """Measures everything, in turns, and returns the list of all results."""
    together = ([args.batch_size], args.workers)
    alone = ([args.batch_size, args.batch_size // args.workers], 1)
    results = []
    for turn in range(args.rounds):
        for (batch_sizes, processes), library in itertools.product(
            (together, alone), args.libraries
        ):
            command = [
                *(sys.executable, str(TASK), "--library", library),
                *("--batch_sizes", *map(str, batch_sizes)),
                *("--steps_per_execution", *map(str, args.steps_per_execution)),
                *("--warmup", str(args.warmup), "--steps", str(args.steps)),
                *("--shares", str(args.workers), "--processes", str(processes)),
            ]
            load = os.getloadavg()[0]  # Other work on the machine would show here.
            for result in launch(command, processes, args.timeout):
                results.append({**result, "workers": processes, "turn": turn, "load": load})
                print(
                    f"turn {turn + 1}, {processes} x {library}, batch {result['batch_size']}, "
                    f"steps_per_execution {result['steps_per_execution']}: "
                    f"median {result['median']:.2f} ms",
                    file=sys.stderr,
                    flush=True,
                )
    return results


def table(results):
    """The results of all turns as a Markdown table, times in milliseconds per step."""
    rows = {}
    for result in results:
        key = (result["workers"], result["batch_size"], result["steps_per_execution"])
        rows.setdefault((*key, result["library"]), []).append(result)
    lines = [
        "| | workers | global batch | steps per execution | median | 10 % to 90 % | mean "
        "| median of each turn |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = sorted(rows, key=lambda k: (-k[0], -k[1], k[2], LIBRARIES.index(k[3])))
    for key in order:
        workers, batch_size, steps_per_execution, library = key
        turns = rows[key]
        calls = [ms for result in turns for ms in result["calls"]]
        deciles = statistics.quantiles(calls, n=10, method="inclusive")
        title = (TITLES if workers > 1 else ALONE)[library]
        medians = ", ".join(f"{result['median']:.1f}" for result in turns)
        lines.append(
            f"| {title} | {workers} | {batch_size} | {steps_per_execution} "
            f"| {statistics.median(calls):.2f} | {deciles[0]:.2f} to {deciles[-1]:.2f} "
            f"| {statistics.fmean(calls):.2f} | {medians} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=64, help="of all workers together")
    parser.add_argument("--steps_per_execution", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each library")
    parser.add_argument("--warmup", type=int, default=40, help="steps left out of the figures")
    parser.add_argument("--steps", type=int, default=200, help="steps measured each turn")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each launch")
    parser.add_argument("--out", type=pathlib.Path, help="where to write everything as JSON")
    args = parser.parse_args()
    for steps_per_execution in args.steps_per_execution:
        if args.warmup % steps_per_execution or args.steps % steps_per_execution:
            parser.error(
                "--warmup and --steps must be multiples of every --steps_per_execution. "
                f"Received: {args.warmup}, {args.steps}, {steps_per_execution}"
            )

    results = run(args)
    if args.out:
        machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
