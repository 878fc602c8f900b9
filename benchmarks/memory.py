"""Peaks of workers' memory by what is in shares: tensors, and all that is resident.

    python benchmarks/memory.py --kinds none all_reduce optimizer all model

Dense layers are trained with Adam, in one process (`none`) and by several workers on this
machine. The state is what a worker keeps of weights and slots; tensors are what TensorFlow's
allocator has handed out at a time, as it would of a GPU's memory; what is resident is counted above
that at the start. `--env NAME=VALUE` compares settings of the environment, such as
TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time

from keras_psplus.cluster.processes import LocalCluster

_MESHES = {"model": None, "mesh": None, "mesh_optimizer": "optimizer", "mesh_all": "all"}
KINDS = ("none", "all_reduce", "int8", "optimizer", "all", *_MESHES)
COLUMNS = ("state", "tensors", "peak", "end", "ms")
BATCH, INPUTS, CLASSES = 32, 64, 10
RESULT = "result: "


def resident():
    """Pages that the process has, or had at most, in MiB: VmRSS and VmHWM."""
    with open("/proc/self/status") as file:
        pairs = (line.split(":") for line in file)
        found = {name: value.split()[0] for name, value in pairs if name in ("VmRSS", "VmHWM")}
    return [int(found[name]) / 1024 for name in ("VmRSS", "VmHWM")]


def strategy_of(kind, workers):
    import keras_psplus as psp

    if kind in _MESHES:
        # One model of all workers, or two rows.
        rows = 1 if kind == "model" else 2
        layouts = psp.LayoutMap(psp.DeviceMesh((rows, workers // rows), ("batch", "model")))
        # Columns and rows in turn: outputs stay in parts from one layer to the next.
        layouts[".*column.*/kernel"], layouts[".*row.*/kernel"] = (None, "model"), ("model", None)
        layouts[".*column.*/bias"] = ("model",)
        return psp.ModelParallelStrategy(layout_map=layouts, shard=_MESHES[kind])
    shard = kind if kind in ("optimizer", "all") else None
    compression = kind if kind == "int8" else None
    return psp.MultiWorkerMirroredStrategy(shard=shard, compression=compression)


def task(kind, width, depth, steps, workers):
    """Trains, and prints its peak above the start, and milliseconds of a step."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = None if kind == "none" else strategy_of(kind, workers)
    start, _ = resident()
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        names = [f"{'row' if i % 2 else 'column'}_{i}" for i in range(depth - 1)]
        layers = [keras.layers.Dense(width, activation="relu", name=name) for name in names]
        model = keras.Sequential(
            [keras.Input((INPUTS,)), *layers, keras.layers.Dense(CLASSES, name="logits")]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    x = np.random.default_rng(0).normal(size=(BATCH * steps, INPUTS)).astype("float32")
    stamps = []
    stamp = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: stamps.append(time.perf_counter())
    )
    model.fit(x, np.arange(len(x)) % CLASSES, batch_size=BATCH, verbose=0, callbacks=[stamp])
    milliseconds = statistics.median(np.diff(stamps[1:]) * 1000)
    now, peak = resident()
    tensors = tf.config.experimental.get_memory_info("CPU:0")["peak"] / (1 << 20)
    kept = [*model.trainable_variables, *model.optimizer.variables]
    parts = [getattr(one._value, "part", one._value) for one in kept]
    values = {
        "state": sum(part.shape.num_elements() * part.dtype.size for part in parts) / (1 << 20),
        "tensors": tensors,
        "peak": peak - start,
        "end": now - start,
        "start": start,
        "ms": milliseconds,
    }
    print(RESULT + json.dumps(values), flush=True)


def measure(kind, args):
    """Results of all workers of one kind."""
    workers = 1 if kind == "none" else args.workers
    values = [f"--{name}={getattr(args, name)}" for name in ("width", "layers", "steps", "workers")]
    command = [sys.executable, __file__, "--task", kind, *values]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    environment |= dict(one.split("=", 1) for one in args.env)
    with tempfile.TemporaryDirectory() as log_dir:
        with LocalCluster(command, workers, env=environment, log_dir=log_dir) as cluster:
            end = cluster.wait(args.timeout)
        if end.exit_code != 0:
            raise RuntimeError(f"{end.tails()}\nReceived: exit code {end.exit_code}")
        lines = [line for log in end.logs.values() for line in log.splitlines()]
    return [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1896, help="of the layers")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for each kind")
    parser.add_argument("--task", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        if args.task == "none":
            os.environ.pop("TF_CONFIG", None)
        task(args.task, args.width, args.layers, args.steps, args.workers)
        return
    square = (args.layers - 2) * (args.width + 1) * args.width
    weights = square + (INPUTS + 1) * args.width + (args.width + 1) * CLASSES
    print(f"{weights:,} weights, Adam, {args.workers} workers, {' '.join(args.env)}\n")
    print("| | state, MiB | tensors | resident | at the end | ms a step |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind in args.kinds:
        found = measure(kind, args)
        spans = [
            " to ".join(f"{value:.0f}" for value in sorted({min(each), max(each)}))
            for each in ([one[name] for one in found] for name in COLUMNS)
        ]
        print(f"| {kind} | {' | '.join(spans)} |", flush=True)


if __name__ == "__main__":
    main()
