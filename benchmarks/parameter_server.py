"""Step times of asynchronous parameter servers: keras_psplus, stock tf_keras, and a bare loop.

    python benchmarks/parameter_server.py --out parameter_server.json

The same models are trained on the same data by tf_keras under TensorFlow's own
ParameterServerStrategy, by Keras 3 under keras_psplus's, and by a hand-written loop over
`ClusterCoordinator.schedule` on the stock strategy's variables, without metrics, which shows what
`fit` adds. The loop and keras_psplus run twice: with batches that the chief sends with each step,
and with a dataset on each worker, which is all that tf_keras has. The libraries take turns, so that
what else the machine does meets all alike.

A time per step is the time of a window of many steps, until the last one is done, divided by their
number, whichever workers took them. Processor time is given as well: the chief's and the ps's bound
the number of workers that they can keep busy, and other work on the machine changes it least. Every
process keeps to its share of this machine's cores.

How fast a chief sends steps shows with workers whose steps compute nothing, and a core of its own:

    python benchmarks/parameter_server.py --models stub --chief_alone --workers 1 4 \\
        --libraries keras keras_dataset

With `--bytes` the bytes that each step sent over the loopback are counted as well, all processes
together. They mean something only while nothing else on the machine uses the loopback.
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

TASK = pathlib.Path(__file__).with_name("parameter_server_task.py")
MODELS = ("stub", "tiny", "digits", "many_layers", "lstm")
TITLES = {
    "tf_keras": "tf_keras, stock strategy",
    "keras_dataset": "Keras 3, keras_psplus, workers read",
    "keras": "Keras 3, keras_psplus, chief sends",
    "bare": "bare loop, chief sends",
    "bare_dataset": "bare loop, workers read",
}


def launch(command, workers, ps, timeout):
    """Runs a command in a cluster and returns the chief's results.

    Raises:
        RuntimeError: If a process fails, or is not done after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as log_dir:
        pids = pathlib.Path(log_dir, "pids.json")
        environment = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "BENCHMARK_PIDS": str(pids),  # whose processor time the chief reads
        }
        cluster = LocalCluster(command, workers, ps, chief=True, env=environment, log_dir=log_dir)
        with cluster:
            pids.write_text(json.dumps(cluster.pids))
            end = cluster.wait(timeout)
        if end.exit_code != 0:
            raise RuntimeError(f"{end.tails()}\nReceived: exit code {end.exit_code}")
        lines = end.logs["chief-0"].splitlines()
    prefix = "result: "
    return [json.loads(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)]


def run(args):
    """Measures everything, in turns, and returns the list of all results."""
    results = []
    for turn, workers, library in itertools.product(
        range(args.rounds), args.workers, args.libraries
    ):
        command = [
            *(sys.executable, str(TASK), "--library", library, "--models", *args.models),
            *("--steps_per_execution", *map(str, args.steps_per_execution)),
            *("--batch_size", str(args.batch_size), "--steps", str(args.steps)),
            *("--warmup", str(args.warmup), "--windows", str(args.windows)),
            *("--shares", str(1 + workers + args.ps)),
            *(["--bytes"] if args.bytes else []),
            *(["--chief_alone"] if args.chief_alone else []),
        ]
        load = os.getloadavg()[0]  # Other work on the machine would show here.
        for result in launch(command, workers, args.ps, args.timeout):
            result.update(workers=workers, ps=args.ps, turn=turn, load=load)
            results.append(result)
            print(
                f"turn {turn + 1}, {workers} worker(s), {library}, {result['model']}, "
                f"steps_per_execution {result['steps_per_execution']}: "
                f"median {statistics.median(result['windows']):.2f} ms, "
                f"first window {result['first_seconds']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        if args.out:  # What there is, should a later launch fail.
            machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
            args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    return results


def table(results, libraries, cell):
    """A Markdown table with a row for each setting and a column for each library."""
    cells = {}
    for result in results:
        setting = (result["model"], result["workers"], result["steps_per_execution"])
        cells.setdefault(setting, {}).setdefault(result["library"], []).append(result)
    lines = [
        "| | workers | steps per execution | " + " | ".join(TITLES[x] for x in libraries) + " |",
        "|---" * (3 + len(libraries)) + "|",
    ]
    for setting in sorted(cells, key=lambda s: (MODELS.index(s[0]), *s[1:])):
        figures = [cell(cells[setting].get(library, [])) for library in libraries]
        lines.append("| " + " | ".join([*map(str, setting), *figures]) + " |")
    return "\n".join(lines)


def wall_time(turns):
    """The median of all windows of all turns, and the extremes."""
    windows = [ms for result in turns for ms in result["windows"]]
    if not windows:
        return ""
    return f"{statistics.median(windows):.2f} ({min(windows):.2f} to {max(windows):.2f})"


def processor_time(turns):
    """The medians of the chief's, all workers' and all ps's processor time."""
    figures = []
    for job in ("chief", "worker", "ps"):
        windows = [ms for result in turns for ms in result["processor"][job]]
        figures += [f"{statistics.median(windows):.1f}"] if windows else []
    return " + ".join(figures)


def megabytes(turns):
    """The median of the bytes of all windows, in millions."""
    windows = [count for result in turns for count in result["bytes"]]
    return f"{statistics.median(windows) / 1e6:.3f}" if windows else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[1:])
    parser.add_argument("--libraries", nargs="+", choices=tuple(TITLES), default=tuple(TITLES))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32, help="of one worker's step")
    parser.add_argument("--steps_per_execution", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each library")
    parser.add_argument("--warmup", type=int, default=1, help="windows left out of the figures")
    parser.add_argument("--windows", type=int, default=5, help="windows measured each turn")
    parser.add_argument("--steps", type=int, default=200, help="steps in a window")
    parser.add_argument("--chief_alone", action="store_true", help="the chief has a core to itself")
    parser.add_argument("--bytes", action="store_true", help="count the loopback's bytes, too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each launch")
    parser.add_argument("--out", type=pathlib.Path, help="where to write everything as JSON")
    args = parser.parse_args()
    for steps_per_execution in args.steps_per_execution:
        if args.steps % steps_per_execution:
            parser.error(
                "--steps must be a multiple of every --steps_per_execution. "
                f"Received: {args.steps}, {steps_per_execution}"
            )

    results = run(args)
    print("Milliseconds per step: median (lowest to highest window)\n")
    print(table(results, args.libraries, wall_time))
    print("\nMilliseconds of processor time per step: chief + workers + ps\n")
    print(table(results, args.libraries, processor_time))
    if args.bytes:
        print("\nMegabytes per step over the loopback\n")
        print(table(results, args.libraries, megabytes))


if __name__ == "__main__":
    main()
