"""Trains each case for a step on devices that stand for GPUs, and writes what walks of it find."""

import argparse
import gc
import json
import math
import pathlib

import numpy as np
import tensorflow as tf

from keras_psplus.cluster.config import read_task_config
from tests.gpu import cases, fake_gpus, findings, walk
from tests.support.traced import recorded


def uncalled(functions):
    """Functions that no other of them calls, the largest first."""
    called = {name for function in functions for name in function.graph._functions}
    first = [f for f in functions if f.function_def.signature.name not in called]
    return sorted(first, key=_size, reverse=True)


def _size(function):
    inner = [f.graph for f in function.graph._functions.values() if hasattr(f, "graph")]
    return sum(len(graph.get_operations()) for graph in [function.graph, *inner])


def data(inputs):
    rng = np.random.default_rng(0)
    shape = (cases.BATCH, *inputs.shape[1:])
    x = rng.normal(size=shape) if inputs.dtype == "float32" else rng.integers(0, cases.IDS, shape)
    return x.astype(inputs.dtype), rng.integers(0, cases.CLASSES, cases.BATCH)


def run(case):
    fake_gpus.use(case.gpus)
    with recorded() as functions:
        with case.strategy().scope():
            model = case.model()
        x, y = data(model.inputs[0])
        history = model.fit(x, y, batch_size=cases.BATCH, shuffle=False, verbose=0)
    assert math.isfinite(history.history["loss"][0])
    walked = walk.Walk(fake_gpus.is_gpu)
    first = uncalled(functions)
    for function in first[:1] if case.on_workers else first:
        walked.function(function, default="gpu" if case.on_workers else walk.HOST)
    found = findings.find(walked, cases.GRADIENT)
    return {"on_gpu": walked.on_gpu, "found": [finding._asdict() for finding in found]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("cases", nargs="+")
    args = parser.parse_args()
    chosen = {name: cases.CASES[name] for name in args.cases}
    fake_gpus.install(max(case.gpus for case in chosen.values()), cases.WORKERS)
    # To optimize graphs is a third of the time, and they are looked at as they were traced.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    results = {}
    for name, case in chosen.items():
        results[name] = run(case)
        # Once this process has joined a cluster, resources of before can no longer be freed.
        gc.collect()
    task = read_task_config()
    if task is None or task.is_chief:
        pathlib.Path(args.out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
