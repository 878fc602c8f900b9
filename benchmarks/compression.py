"""What compression of gradients wins on slow links, beside PyTorch's DDP with its hooks.

    python benchmarks/compression.py --torch_python /path/to/python --out compression.json
    python benchmarks/compression.py --bytes

Trains an MLP of 4.95 million parameters on emulated hosts (`netlab.py`; needs root), each on one
processor core, with each compressor. Libraries take turns, so that what else the machine does meets
both alike. A step without communication is measured as well, and all times are compared with their
own library's. With `--bytes`, links are fast, and what hosts send is compared with what
`strategy.communication` counts.
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
TASKS = {"psp": HERE / "compression_task.py", "torch": HERE / "compression_torch_task.py"}
TITLES = {"psp": "keras_psplus", "torch": "PyTorch DDP"}
METHODS = {
    "psp": [
        *("alone", "none", "bf16", "fp16", "int8", "sign"),
        *("topk:0.01", "randomk:0.01", "powersgd:4", "powersgd:1"),
    ],
    "torch": ["alone", "none", "bf16", "fp16", "powersgd:4", "powersgd:1"],
}
# Roughly, MB that a worker sends in a step; the others send less. Only to choose how many to take.
MEGABYTES = {"none": 20, "bf16": 10, "fp16": 10, "int8": 5}
# How long a step may take, in steps without communication.
TARGETS = {
    ("1gbit", "powersgd:4"): 1.5,
    ("1gbit", "topk:0.01"): 1.5,
    ("1gbit", "int8"): 4.0,
    ("100mbit", "powersgd:4"): 3.0,
    ("100mbit", "powersgd:1"): 3.0,
}
# What a step may send beyond what is counted: a part of it (headers of packets), and bytes for each
# other worker (metrics, control, headers of messages, of which a longer ring takes more).
BYTES_PART, BYTES_EACH = 0.05, 10_000


def launch(args, library, method, hosts, rate, delay, steps):
    """Trains on some hosts and returns each one's results.

    Raises:
        RuntimeError: If a worker fails, or is not done after `--timeout` seconds.
    """
    with netlab.Lab(hosts, rate, delay) as lab:
        addresses = [f"{lab.ip(rank)}:2222" for rank in range(hosts)]
        commands = [
            [
                *(args.torch_python if library == "torch" else sys.executable, TASKS[library]),
                *("--rank", rank, "--addresses", *addresses, "--method", method),
                *("--batch_size", args.batch_size, "--warmup", args.warmup, "--steps", steps),
                *("--bucket_bytes", args.bucket_bytes),
            ]
            for rank in range(hosts)
        ]
        return netlab_job.run(lab, commands, args.timeout)


def measure(args, library, method, hosts, rate, delay, steps):
    """One launch as one dict: times of worker 0, bytes on average over the workers."""
    results = launch(args, library, method, hosts, netlab.parse_rate(rate), delay, steps)
    result = {**results[0], "library": library, "method": method, "rate": rate, "hosts": hosts}
    for key in ("sent", "counted"):
        if key in result:
            result[key] = statistics.fmean(r[key] for r in results)
    result["load"] = os.getloadavg()[0]  # Other work on the machine would show here.
    counted = f", counted {result['counted'] / 1e6:.3f}" if "counted" in result else ""
    print(
        f"{library} {method}, {hosts} hosts, {rate}: median {result['median']:.1f} ms of "
        f"{len(result['times'])}, processor {result['processor']:.1f} ms, "
        f"sent {result['sent'] / 1e6:.3f} MB{counted}, load {result['load']:.1f}",
        file=sys.stderr,
        flush=True,
    )
    return result


def launches(args, methods):
    """Yields each turn, rate, method and library that is asked for; libraries take turns."""
    libraries = ["psp", "torch"] if args.torch_python else ["psp"]
    asked = [m for m in methods["psp"] if not args.methods or m in args.methods]
    for turn, rate, method, library in itertools.product(
        range(args.turns), args.rates, asked, libraries
    ):
        if method in methods[library]:
            yield turn, rate, method, library


def run_times(args):
    """Step times with all methods and rates, libraries in turns."""
    results = []
    for turn, rate, method, library in launches(args, METHODS):
        bits = netlab.parse_rate(rate) or 1e10
        step = 0.03 + MEGABYTES.get(method, 0.5) * 8e6 / bits
        steps = max(15, min(200, round(args.seconds / step)))
        result = measure(args, library, method, 2, rate, args.delay / 1e3, steps)
        results.append({**result, "turn": turn})
    return results


def run_bytes(args):
    """Bytes with all compressors, on fast links."""
    return [
        measure(args, "psp", method, hosts, "none", 0.0, args.byte_steps)
        for hosts, method in itertools.product(args.hosts, args.methods or METHODS["psp"])
    ]


def times_table(results, rates):
    """Step times as a Markdown table, and dict of their ratios to steps without communication."""
    pooled = {}
    for result in results:
        pooled.setdefault((result["rate"], result["library"], result["method"]), []).append(result)
    medians = {
        key: statistics.median([ms for turn in turns for ms in turn["times"]])
        for key, turns in pooled.items()
    }
    ratios = {
        (rate, library, method): ms / medians[rate, library, "alone"]
        for (rate, library, method), ms in medians.items()
        if (rate, library, "alone") in medians
    }
    head = " | ".join(f"{rate}: ms | ratio | medians of turns" for rate in rates)
    columns = 4 + 3 * len(rates)
    lines = [f"| | method | MB sent | processor ms | {head} |", "|---" * columns + "|"]
    for library, method in itertools.product(TITLES, METHODS["psp"]):
        keys = [key for rate in rates if (key := (rate, library, method)) in pooled]
        if not keys:
            continue
        both = [
            statistics.median(turn[figure] for key in keys for turn in pooled[key])
            for figure in ("sent", "processor")
        ]
        cells = []
        for key in keys:
            turns = ", ".join(f"{turn['median']:.1f}" for turn in pooled[key])
            cells.append(f"{medians[key]:.1f} | {ratios.get(key, float('nan')):.2f} | {turns}")
        figures = f"{both[0] / 1e6:.3f} | {both[1]:.1f} | {' | '.join(cells)}"
        lines.append(f"| {TITLES[library]} | {method} | {figures} |")
    return "\n".join(lines), ratios


def targets(ratios):
    """Lines that say which targets are met."""
    lines = []
    for (rate, method), limit in TARGETS.items():
        if (ratio := ratios.get((rate, "psp", method))) is not None:
            lines.append(_verdict(ratio <= limit, f"{rate} {method}: {ratio:.2f} of {limit}"))
    for (rate, library, method), theirs in ratios.items():
        ratio = ratios.get((rate, "psp", method))
        if library == "torch" and method != "alone" and ratio is not None:
            line = f"{rate} {method}: {ratio:.2f}, PyTorch {theirs:.2f}"
            lines.append(_verdict(ratio <= theirs, line))
    return "\n".join(lines)


def bytes_table(results):
    """Bytes as a Markdown table, with a verdict on each row."""
    lines = ["| method | workers | sent, bytes | counted | beyond | |", "|---" * 6 + "|"]
    for result in results:
        sent, counted = result["sent"], result["counted"]
        allowed = BYTES_PART * counted + BYTES_EACH * (result["hosts"] - 1)
        good = abs(sent - counted) <= allowed
        lines.append(
            f"| {result['method']} | {result['hosts']} | {sent:,.0f} | {counted:,.0f} "
            f"| {sent - counted:,.0f} | {'ok' if good else 'MISSED'} |"
        )
    return "\n".join(lines)


def _verdict(good, line):
    return f"{'ok' if good else 'MISSED'}  {line}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", action="store_true", help="compare bytes, measure no times")
    parser.add_argument("--torch_python", help="Python that has PyTorch; without it, ours alone")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--delay", type=float, default=0.1, help="ms from host to host")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="with --bytes")
    parser.add_argument("--methods", nargs="+", help="of these alone")
    parser.add_argument("--batch_size", type=int, default=64, help="of one worker")
    parser.add_argument("--bucket_bytes", type=float, default=4 << 20, help="of keras_psplus")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=8, help="steps left out of the figures")
    parser.add_argument("--seconds", type=float, default=6, help="about so long, for each figure")
    parser.add_argument("--byte_steps", type=int, default=20, help="with --bytes")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each launch")
    parser.add_argument("--out", type=pathlib.Path, help="where to write everything as JSON")
    args = parser.parse_args()
    results = run_bytes(args) if args.bytes else run_times(args)
    if args.out:
        machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    if args.bytes:
        print(bytes_table(results))
        return
    table, ratios = times_table(results, args.rates)
    print(table)
    print(targets(ratios))


if __name__ == "__main__":
    main()
