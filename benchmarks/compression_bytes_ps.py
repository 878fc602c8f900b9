"""Bytes of a step under ParameterServerStrategy: what the kernel counts, and what we count.

    python benchmarks/compression_bytes_ps.py

A multilayer perceptron 784-1600-1600-700-10 (4.95 million parameters) is trained by two and by four
workers with one and with two parameter servers, once for each way of compressing gradients and
reads. The bytes that the loopback has carried in a step, those of all tasks together, stand beside
what `strategy.communication` says. The step's batch and its messages are not in the latter. They
are the same for all: what the first row has of them is taken off in the last column.

As root, everything runs in a network namespace of its own, so that nobody else's bytes are counted.
Otherwise nothing else on the machine may use the loopback meanwhile.
"""

import argparse
import os

from lab import counted_job

PUSHES = ("none", "bf16", "fp16", "int8", "sign", "topk:0.01", "randomk:0.01", "powersgd:4")
PULLS = ("bf16", "int8")
SETTINGS = [(push, "none") for push in PUSHES] + [("none", pull) for pull in PULLS]
SETTINGS.append(("int8", "int8"))
BATCH, STEPS = 8, 8


def name_of(push, pull):
    return f"{push}-{pull}".replace(":", "_")


def measure():
    """Trains a model for each setting on the chief and prints the bytes sent."""
    import keras
    import numpy as np

    import keras_psplus as psp
    from keras_psplus import compression

    def by_name(choose):
        patterns = {
            f"{name_of(*setting)}/*": compression.get(None if name == "none" else name)
            for setting in SETTINGS
            for name in [choose(setting)]
        }
        return compression.ByVariable(patterns)

    strategy = psp.ParameterServerStrategy(
        compression=by_name(lambda setting: setting[0]),
        pull_compression=by_name(lambda setting: setting[1]),
    )
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 784)).astype("float32")
    y = np.arange(len(x)) % 10
    results = []
    for push, pull in SETTINGS:
        with strategy.scope():
            widths = (1600, 1600, 700)
            hidden = [keras.layers.Dense(width, activation="relu") for width in widths]
            model = keras.Sequential(
                [keras.Input((784,)), *hidden, keras.layers.Dense(10)], name=name_of(push, pull)
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.01), loss)

        def train(model=model):
            model.fit(x, y, batch_size=BATCH, verbose=0)
            counted = strategy.communication.wire_bytes
            return np.array([counted_job.loopback_bytes(), counted])

        train()
        before = train()
        measured, counted = (train() - before) / STEPS
        results.append({"push": push, "pull": pull, "measured": measured, "counted": counted})
    counted_job.print_result(results)


def table(by_ps):
    """A Markdown table."""
    lines = [
        "| `compression` | `pull_compression` | "
        + " | ".join(f"{ps} ps: measured | counted | measured - constant" for ps in by_ps)
        + " |",
        "|---" * (2 + 3 * len(by_ps)) + "|",
    ]
    for i, (push, pull) in enumerate(SETTINGS):
        cells = [push, pull]
        for results in by_ps.values():
            constant = results[0]["measured"] - results[0]["counted"]
            measured, counted = results[i]["measured"], results[i]["counted"]
            off = (measured - constant) / counted - 1
            cells += [f"{measured / 1e6:.3f}", f"{counted / 1e6:.3f}", f"{100 * off:+.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ps", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    counted_job.add_flags(parser, timeout=600)
    args = parser.parse_args()
    counted_job.move_into_own_network(args)
    for workers in args.workers:
        by_ps = {
            ps: counted_job.launch(__file__, workers, ps, args.timeout, chief=True)
            for ps in args.ps
        }
        print(f"Megabytes of a step, {workers} workers\n\n{table(by_ps)}\n")


if __name__ == "__main__":
    measure() if "TF_CONFIG" in os.environ else main()
