"""What `HybridStrategy` wins on slow links for a model with a large embedding.

    python benchmarks/hybrid.py --torch_python /path/to/python --out hybrid.json
    python benchmarks/hybrid.py --table_size 20000 200000 --methods hybrid all-reduce

The rows of 26 ids of each example are summed, and a small MLP follows; plain SGD. Each worker and
each parameter server is an emulated host (`netlab.py`; needs root) on one processor core; with more
hosts than cores they share them. Libraries take turns. A step of one worker alone is measured as
well, and all times are compared with their own library's. `tf_keras ps` is asynchronous: its time
is that in which each worker has done a step.
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import statistics
import sys

import netlab
import netlab_job

HERE = pathlib.Path(__file__).parent
# By library: its name, and its methods.
TITLES = {"tf_keras": "tf_keras", "torch": "PyTorch DDP", "psp": "keras_psplus"}
METHODS = {
    "tf_keras": ["alone", "all-gather", "ps"],
    "torch": ["alone", "sparse"],
    "psp": [
        *("alone", "all-reduce", "hybrid", "hybrid bf16", "hybrid int8"),
        *("hybrid prefetch", "hybrid int8 prefetch"),
    ],
}


def jobs_of(library, method, workers, ps):
    """The job of each host, and the ranks of those that train."""
    if method == "alone":
        return ["worker"], [0]
    if method == "ps":
        return [*["worker"] * workers, *["ps"] * ps, "chief"], [workers + ps]
    servers = ps if method.startswith("hybrid") else 0
    return ["worker"] * workers + ["ps"] * servers, list(range(workers))


def launch(args, library, method, workers, table_size, rate):
    """Trains in one way, and returns its figures."""
    jobs, trainers = jobs_of(library, method, workers, args.ps)
    torch = library == "torch"
    task = "hybrid_torch_task.py" if torch else "hybrid_task.py"
    with netlab.Lab(len(jobs), netlab.parse_rate(rate), args.delay / 1e3) as lab:
        commands = [
            [
                *(args.torch_python if torch else sys.executable, HERE / task),
                *("--library", library, "--method", method, "--rank", rank),
                *("--tasks", *(f"{job}={lab.ip(i)}:2222" for i, job in enumerate(jobs))),
                *("--table_size", table_size, "--ids", args.ids or min(args.table_size)),
                *("--batch_size", args.batch_size, "--warmup", args.warmup),
                *("--steps", args.steps, "--window", args.window),
            ]
            for rank in range(len(jobs))
        ]
        # TensorFlow's servers look nowhere else. With a single thread between operations, one
        # that waits for a peer would hold up all others.
        env = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
        answers = netlab_job.run(lab, commands, args.timeout, trainers, env)
    return _by_job(next(answer for answer in answers if answer), jobs)


def _by_job(figures, jobs):
    """The figures of a launch, with means over the hosts of each job."""
    result = {"times": figures["times"], "median": figures["median"]}
    for what, job in itertools.product(("sent", "received", "processor"), dict.fromkeys(jobs)):
        values = [value for value, host in zip(figures[what], jobs) if host == job]
        result.setdefault(what, {})[job] = statistics.fmean(values)
    return result


def run(args):
    """Everything that is asked for, libraries in turns."""
    results = []
    libraries = [name for name in METHODS if name != "torch" or args.torch_python]
    longest = max(map(len, METHODS.values()))
    for turn, table_size, workers, rate, place, library in itertools.product(
        range(args.turns), args.table_size, args.workers, args.rates, range(longest), libraries
    ):
        if place >= len(METHODS[library]):
            continue
        method = METHODS[library][place]
        if method == "alone" and (workers, rate) != (args.workers[0], args.rates[0]):
            continue
        if args.methods and method not in args.methods:
            continue
        load = os.getloadavg()[0]  # Other work on the machine would show here.
        result = launch(args, library, method, workers, table_size, rate)
        setting = {"workers": workers, "table_size": table_size, "turn": turn, "load": load}
        setting.update(library=library, method=method, rate="none" if method == "alone" else rate)
        results.append({**result, **setting})
        print(
            f"{library} {method}, {workers} workers, {table_size} rows, {rate}: "
            f"median {result['median']:.1f} ms of {len(result['times'])}, "
            f"sent {megabytes(result['sent'])}, received {megabytes(result['received'])} MB, "
            f"processor {milliseconds(result['processor'])} ms, load {load:.1f}",
            file=sys.stderr,
            flush=True,
        )
        if args.out:  # What there is, should a later launch fail.
            machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
            settings = {key: str(value) for key, value in vars(args).items()}
            document = {"machine": machine, "settings": settings, "results": results}
            args.out.write_text(json.dumps(document, indent=1))
    return results


def megabytes(by_job):
    return " + ".join(f"{job} {count / 1e6:.3f}" for job, count in by_job.items())


def milliseconds(by_job):
    return " + ".join(f"{job} {ms:.1f}" for job, ms in by_job.items())


def table(results, rates):
    """A Markdown table; figures are medians over the turns, of times over all steps."""
    pooled = {}
    for r in results:
        key = (r["table_size"], r["workers"], r["library"], r["method"], r["rate"])
        pooled.setdefault(key, []).append(r)
    medians = {
        key: statistics.median([ms for turn in turns for ms in turn["times"]])
        for key, turns in pooled.items()
    }
    heads = " | ".join(f"{rate}: ms | of alone | medians of turns" for rate in rates)
    lines = [
        "| rows | workers | | method | MB sent by a worker | received | MB sent by a ps | received "
        f"| processor ms: worker | ps | {heads} |",
        "|---" * (10 + 3 * len(rates)) + "|",
    ]
    for size, workers, library, method in dict.fromkeys(key[:4] for key in pooled):
        row = (size, workers, library, method)
        turns = [turn for key, turns in pooled.items() if key[:4] == row for turn in turns]

        def figure(what, job, scale, digits, turns=turns):
            values = [turn[what][job] / scale for turn in turns if job in turn[what]]
            return f"{statistics.median(values):.{digits}f}" if values else ""

        cells = [size, 1 if method == "alone" else workers, TITLES[library], method]
        for job in ("worker", "ps"):
            cells += [figure("sent", job, 1e6, 3), figure("received", job, 1e6, 3)]
        cells += [figure("processor", job, 1, 1) for job in ("worker", "ps")]
        alone = [
            ms for key, ms in medians.items() if (key[0], *key[2:4]) == (size, library, "alone")
        ]
        for rate in ["none"] if method == "alone" else rates:
            ratio = medians[*row, rate] / alone[0] if alone else float("nan")
            each = ", ".join(f"{turn['median']:.1f}" for turn in pooled[*row, rate])
            cells += [f"{medians[*row, rate]:.1f}", f"{ratio:.2f}", each]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch_python", help="Python that has PyTorch; without it, none")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--delay", type=float, default=0.1, help="ms from host to host")
    parser.add_argument("--methods", nargs="+", help="of these alone")
    parser.add_argument("--table_size", type=int, nargs="+", default=[200_000], help="rows")
    parser.add_argument("--ids", type=int, help="rows that are used; those of the smallest table")
    parser.add_argument("--batch_size", type=int, default=256, help="of one worker")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=10, help="steps left out of the figures")
    parser.add_argument("--steps", type=int, default=40, help="steps of each worker")
    parser.add_argument("--window", type=int, default=5, help="steps that `ps` times together")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each launch")
    parser.add_argument("--out", type=pathlib.Path, help="where to write everything as JSON")
    args = parser.parse_args()
    if args.steps % args.window or args.warmup % args.window:
        parser.error(
            "--steps and --warmup must be multiples of --window. "
            f"Received: {args.steps}, {args.warmup}, {args.window}"
        )
    results = run(args)
    print(table(results, args.rates))


if __name__ == "__main__":
    main()
