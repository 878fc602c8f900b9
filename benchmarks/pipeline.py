"""Step times of a pipeline on several hosts.

They are compared with one process, all-reduce and PyTorch.

    sudo python benchmarks/pipeline.py --torch PYTHON_WITH_TORCH --out pipeline.jsonl

Emulated hosts of one core each (see `tests/lab/netlab.py`), two stages. The chief has a host
of its own and shares a core with a stage. Each line of the output is one job: milliseconds of a
step by windows of steps, and the bytes that each host has sent and received in a step, as the
kernel counts them, beside those that a pipeline has counted itself
(`strategy.communication`).
"""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from lab import job, wire  # noqa: E402
from lab.pipeline_work import WORKS  # noqa: E402

from tests.lab import netlab  # noqa: E402

STAGES = 2
KERAS = ("one_process", "gpipe", "1f1b", "pipedream", "gpipe bf16", "pipedream bf16", "all_reduce")
TORCH = ("torch", "torch gpipe", "torch 1f1b")


def jobs_of(method):
    """The jobs of a method's hosts, the one that leads first."""
    if method in ("one_process", "torch"):
        return ["worker"]
    if method == "all_reduce" or method in TORCH:
        return ["worker"] * STAGES
    return ["chief"] + ["worker"] * STAGES


def run(args, method, work, rate, microbatches):
    """Runs one job, and returns its figures or what went wrong."""
    jobs = jobs_of(method)
    layers = len(WORKS[work].widths) - 1
    names = [f"dense_{i}" for i in range(layers - 1)] + ["head"]
    cut = args.cut or (layers // 2 if work == "deep" else 1)
    given = {
        "method": method,
        "jobs": jobs,
        "work": work,
        "microbatches": microbatches,
        "stages": [["input_layer*", *names[:cut]], names[cut:]] if args.cut else "auto",
        "cuts": [cut],
        "window": args.window,
        "windows": args.windows,
        "warmup": 2 * args.window,
    }
    python = args.torch if method in TORCH else sys.executable
    module = "lab.pipeline_torch_task" if method in TORCH else "lab.pipeline_task"
    with netlab.Lab(len(jobs)) as lab:
        lab.set_rate(wire.parse_rate(rate))
        given["addresses"] = [lab.address(rank) for rank in range(len(jobs))]
        commands = [
            [python, "-m", module, json.dumps({**given, "rank": rank})] for rank in range(len(jobs))
        ]
        results, error = job.run(lab, commands, args.timeout, 0)
    return results[0] if results else {"error": error}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=KERAS + TORCH)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["deep"])
    parser.add_argument("--rates", nargs="+", default=["1gbit"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8])
    parser.add_argument("--cut", type=int, help="layers of the first stage; by default, auto")
    parser.add_argument("--window", type=int, default=2, help="steps that are timed together")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--torch", help="a Python with PyTorch")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    problem = netlab.why_not(1e9)
    if problem:
        sys.exit(f"No lab: {problem}")
    methods = args.methods or KERAS + (TORCH if args.torch else ())
    for turn in range(args.turns):
        for work in args.works:
            for rate in args.rates:
                for method in methods:
                    alone = method in ("one_process", "all_reduce", "torch")
                    for count in args.microbatches[:1] if alone else args.microbatches:
                        found = run(args, method, work, rate, count)
                        found |= {"work": work, "rate": rate, "method": method, "turn": turn}
                        found["microbatches"] = None if alone else count
                        if args.out:
                            with args.out.open("a") as file:
                                file.write(json.dumps(found) + "\n")
                        show(found)


def show(found):
    """Prints a line for one job."""
    head = f"{found['work']:6} {found['rate']:8} {found['method']:16} m={found['microbatches']}"
    if "error" in found:
        print(f"{head}: FAILED\n{found['error']}", flush=True)
        return
    times = found["times"]
    sent = ", ".join(f"{n / 1e6:.2f}" for n in found["sent"])
    counted = ""
    if "counted" in found:
        ways = ", ".join(f"{n / 1e6:.2f}" for n in found["counted"])
        counted = f"; MB counted forward, backward: {ways}"
    print(
        f"{head}: {statistics.median(times):7.1f} ms ({min(times):.1f} to {max(times):.1f}); "
        f"MB sent by hosts: {sent}{counted}; "
        f"ms processor: {', '.join(f'{n:.0f}' for n in found.get('processor', []))}; "
        f"first window after {found.get('first_window_s', 0):.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
