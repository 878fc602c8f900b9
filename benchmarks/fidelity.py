"""Accuracy under compression of gradients and less frequent communication, on real data.

    python benchmarks/fidelity.py --out fidelity.jsonl

Trains each task exactly and with each compressor, with some seeds (of the weights, the order of the
examples and, where there is a choice, the split of the data), two replicas each time, and prints
tables of what is reached on the test data. Every training is a process of its own, one after the
other; each one's result goes to the end of the file at once, and what the file holds already is not
trained again.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

TASK = pathlib.Path(__file__).with_name("fidelity_task.py")

_EVERY = [
    *("none", "bf16", "fp16", "int8", "int8, stochastic", "sign"),
    *("topk:0.01", "randomk:0.1", "powersgd:4", "powersgd:1"),
]
_RARER = [
    *("accumulate:4", "local_sgd:8", "diloco:32", "diloco:32, int8"),
    "diloco:32, outer momentum 0.5, int8",
]
# Stages of a pipeline: these send activations.
_STAGES = ["pipedream", "pipeline, int8"]

# Each task's title, metric, and compressors or updates.
EXPERIMENTS = {
    "digits": ("Digits, convolutional network, SGD", "accuracy", [*_EVERY, *_RARER, *_STAGES]),
    "digits_momentum": (
        "Digits, convolutional network, SGD with momentum 0.9",
        "accuracy",
        ["none", "topk:0.01", "topk:0.01, momentum correction", "pipedream"],
    ),
    "characters": (
        "Characters, causal convolutions, Adam without momentum (beta_1=0)",
        "perplexity",
        [*_EVERY, "topk:0.01, warm-up", "powersgd:4, warm-up", *_RARER, *_STAGES],
    ),
    "characters_adam": (
        "Characters, causal convolutions, Adam",
        "perplexity",
        ["none", "bf16", "int8", "topk:0.01", "powersgd:4", "pipedream"],
    ),
    "ngrams": (
        "Hashed n-grams, a table of 200,000 rows, SGD",
        "accuracy",
        [*_EVERY, "topk:0.01, rows in int8", "topk:0.01, rows as well", *_RARER],
    ),
}
# How much worse than exact training may be: in points of accuracy, in per cent of perplexity.
MARGINS = {"accuracy": 0.5, "perplexity": 1.0}
# Of differences, in drawings.
UNITS = {"accuracy": "points of accuracy", "perplexity": "% of perplexity (less: better)"}


def train(task, compression, seed, timeout):
    """Trains in a process of its own and returns its result.

    Raises:
        RuntimeError: If it fails, or is not done after `timeout` seconds.
    """
    command = [sys.executable, str(TASK)]
    command += ["--task", task, "--compression", compression, "--seed", str(seed)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TF_CONFIG", None)
    try:
        end = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{task}, {compression} is not done after {timeout:g} s") from error
    results = [line for line in end.stdout.splitlines() if line.startswith("result: ")]
    if end.returncode or len(results) != 1:
        raise RuntimeError(f"{end.stdout[-2000:]}{end.stderr[-4000:]}\nReceived: {command}")
    return json.loads(results[0].removeprefix("result: "))


def read(path):
    """Returns the results of an earlier run, without a line that was cut off."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        with path.open("a") as file:
            file.write("\n")
    results = []
    for line in text.splitlines():
        try:
            results.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"left out of {path}: {line!r}", file=sys.stderr)
    return results


def run(tasks, compressions, seeds, path, timeout):
    """Trains what the file does not hold yet; returns all its results, and what failed."""
    results = read(path)
    done = {(r["task"], r["compression"], r["seed"]) for r in results}
    failed = []
    # Seed by seed, so that a run which is broken off leaves whole columns.
    for seed, task in itertools.product(seeds, tasks):
        for compression in EXPERIMENTS[task][2]:
            left_out = compressions and compression not in compressions
            if left_out or (task, compression, seed) in done:
                continue
            begin = time.perf_counter()
            try:
                result = train(task, compression, seed, timeout)
            except RuntimeError as error:
                failed.append((task, compression, seed))
                print(error, file=sys.stderr, flush=True)
                continue
            result = {"task": task, "compression": compression, "seed": seed, **result}
            results.append(result)
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            metric = EXPERIMENTS[task][1]
            print(
                f"{task}, {compression}, seed {seed}: {metric} {result[metric]:.4f}, "
                f"{time.perf_counter() - begin:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return results, failed


def table(results, metric, compressions):
    """A Markdown table of one task's results, a row for each compressor."""
    reached = {}
    for result in results:
        of_seeds = reached.setdefault(result["compression"], {})
        of_seeds[result["seed"]] = result
    exact = {seed: result[metric] for seed, result in reached.get("none", {}).items()}
    unit = "points" if metric == "accuracy" else "%"
    lines = [
        f"| compressor | fewer bytes | {metric} | lowest to highest | seeds | difference | "
        f"of single seeds | within {MARGINS[metric]:g} {unit} |",
        "|---" * 8 + "|",
    ]
    for compression in compressions:
        of_seeds = reached.get(compression, {})
        if not of_seeds:
            continue
        values = [_shown(result[metric], metric) for result in of_seeds.values()]
        cells = [
            f"`{compression}`" if ":" in compression else compression,
            ""
            if compression in ("none", *_STAGES)
            else f"{_fewer(of_seeds, reached.get('none', {})):.3g} x",
            f"{statistics.mean(values):.2f}",
            f"{min(values):.2f} to {max(values):.2f}",
            str(len(values)),
        ]
        both = sorted(exact.keys() & of_seeds.keys())
        if compression != "none" and both:
            differences = [loss_of(of_seeds[s][metric], exact[s], metric) for s in both]
            mean = statistics.mean(differences)
            cells += [
                f"{mean:+.2f}",
                ", ".join(f"{difference:+.2f}" for difference in differences),
                "yes" if is_within(mean, metric) else "**no**",
            ]
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _fewer(of_seeds, exact):
    """Factor by which fewer bytes than in exact training were sent."""
    for seed, result in of_seeds.items():
        if "sent" in result and "sent" in exact.get(seed, {}):
            return exact[seed]["sent"] / result["sent"]
    return next(iter(of_seeds.values()))["ratio"]


def loss_of(value, exact, metric):
    """The difference from exact training: points of accuracy, or per cent of perplexity."""
    return 100 * (value - exact) if metric == "accuracy" else 100 * (value / exact - 1)


def is_within(difference, metric):
    """Whether it is not worse than exact training by more than the margin."""
    worse = -difference if metric == "accuracy" else difference
    return worse <= MARGINS[metric]


def _shown(value, metric):
    return 100 * value if metric == "accuracy" else value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--compressions", nargs="+", help="only these; by default, all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each training")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fidelity.jsonl"))
    args = parser.parse_args()
    results, failed = run(args.tasks, args.compressions, args.seeds, args.out, args.timeout)
    for task in args.tasks:
        title, metric, compressions = EXPERIMENTS[task]
        print(f"### {title}\n")
        of_task = [r for r in results if r["task"] == task and r["seed"] in args.seeds]
        print(table(of_task, metric, compressions) + "\n")
    if failed:
        sys.exit("failed: " + ", ".join(map(str, failed)))


if __name__ == "__main__":
    main()
