"""What rarer updates win on slow links, beside PyTorch's accumulation and local SGD.

    python benchmarks/updates.py --torch_python /path/to/python --out updates.json

The same model on the same emulated hosts as in `compression.py`. A time is the mean over batches,
of a whole number of rounds: most batches send nothing, and some all there is.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys

import compression
import netlab

METHODS = {
    "psp": ["alone", "none", "accumulate:4", "local_sgd:8", "diloco:32", "diloco:32,int8"],
    "torch": ["alone", "none", "accumulate:4", "local_sgd:8"],
}


def run(args):
    """One result for each library, method and rate."""
    results = []
    for turn, rate, method, library in compression.launches(args, METHODS):
        steps = args.steps if method != "none" else 16
        bits = netlab.parse_rate(rate)
        result = compression.launch(args, library, method, 2, bits, args.delay / 1e3, steps)[0]
        mean = statistics.fmean(result["times"])
        results.append(
            {**result, "library": library, "method": method, "rate": rate, "turn": turn, "ms": mean}
        )
        print(
            f"{library} {method}, {rate}: {mean:.1f} ms, processor {result['processor']:.1f} ms, "
            f"sent {result['sent'] / 1e6:.3f} MB",
            file=sys.stderr,
            flush=True,
        )
    return results


def table(results, rates):
    """Means per batch as a Markdown table."""
    head = " | ".join(f"{rate}: ms | of alone" for rate in rates)
    lines = [f"| | method | MB sent | processor ms | {head} |", "|---" * (4 + 2 * len(rates)) + "|"]
    for library, method in itertools.product(compression.TITLES, METHODS["psp"]):

        def mean(figure, method=method, library=library, rate=None):
            found = [
                r[figure]
                for r in results
                if (r["library"], r["method"]) == (library, method) and rate in (None, r["rate"])
            ]
            return statistics.median(found) if found else float("nan")

        if mean("ms") != mean("ms"):
            continue
        cells = [f"{mean('sent') / 1e6:.3f} | {mean('processor'):.1f}"]
        for rate in rates:
            ratio = mean("ms", rate=rate) / mean("ms", method="alone", rate=rate)
            cells.append(f"{mean('ms', rate=rate):.1f} | {ratio:.2f}")
        lines.append(f"| {compression.TITLES[library]} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch_python", help="Python that has PyTorch; without it, ours alone")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--delay", type=float, default=0.1, help="ms from host to host")
    parser.add_argument("--methods", nargs="+", help="of these alone")
    parser.add_argument("--batch_size", type=int, default=64, help="of one worker")
    parser.add_argument("--bucket_bytes", type=float, default=4 << 20, help="of keras_psplus")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=32, help="batches left out")
    parser.add_argument("--steps", type=int, default=96, help="batches; of whole rounds")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each launch")
    parser.add_argument("--out", type=pathlib.Path, help="where to write everything as JSON")
    args = parser.parse_args()
    results = run(args)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    print(table(results, args.rates))


if __name__ == "__main__":
    main()
