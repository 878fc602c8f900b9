"""One check of `gpu.py`, in the processes of one job."""

import argparse
import contextlib
import json
import os
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras_psplus as psp  # isort: skip  before TensorFlow's runtime

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import compression

_BATCH, _MEMORY = 64, 8000


def devices(kind, count):
    """Prepares this process's devices of a kind; a process without any keeps its CPU."""
    physical = tf.config.list_physical_devices(kind)
    if not physical:
        return
    if count > 1:
        memory = {} if kind == "CPU" else {"memory_limit": _MEMORY}
        tf.config.set_logical_device_configuration(
            physical[0], [tf.config.LogicalDeviceConfiguration(**memory)] * count
        )
    elif kind == "GPU":
        tf.config.experimental.set_memory_growth(physical[0], True)


def strategy_of(options):
    name, given = options.strategy, json.loads(options.arguments)
    if name == "none":
        return None
    if name == "ModelParallelStrategy":
        layouts = psp.LayoutMap(psp.DeviceMesh((1, 2), ("batch", "model")))
        for path, layout in given.items():
            layouts[path] = tuple(layout)
        given = {"layout_map": layouts}
    return getattr(psp, name)(**given)


def dense(width):
    return keras.Sequential(
        [
            keras.Input((width,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def transformer(width):
    inputs = keras.Input((128,), dtype="int32")
    h = keras.layers.Embedding(5000, width)(inputs)
    for _ in range(4):
        a = keras.layers.LayerNormalization()(h)
        h = h + keras.layers.MultiHeadAttention(8, width // 8)(a, a)
        a = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(h))
        h = h + keras.layers.Dense(width)(a)
    pooled = keras.layers.GlobalAveragePooling1D()(h)
    return keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(pooled))


def table(width):
    """A model with an embedding, of whose gradient rows are sent."""
    inputs = keras.Input((8,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(20_000, width)(inputs))
    return keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(rows))


def dynamic(width):
    """The same with a table for any id."""
    inputs = keras.Input((8,), dtype="int64")
    rows = keras.layers.Flatten()(psp.layers.DynamicEmbedding(width)(inputs))
    return keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(rows))


_MODELS = {"dense": dense, "transformer": transformer, "table": table, "dynamic": dynamic}


def fit(options):
    """Losses of epochs, milliseconds of a step, a weight's device and peak memory."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(options.policy)
    strategy = strategy_of(options)
    width, rows = options.width, _BATCH * options.steps
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = _MODELS[options.model](width)
        optimizer = keras.optimizers.get(options.optimizer)
        # Larger ones make a transformer's losses, which are compared, jump.
        is_small = options.optimizer != "sgd" or options.model == "transformer"
        optimizer.learning_rate = 0.001 if is_small else 0.01
        if options.policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        jit = {"auto": "auto", "yes": True, "no": False}[options.jit]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=jit)
    random = np.random.RandomState(0)
    x = random.randn(rows, width).astype("float32")
    if options.model != "dense":
        x = random.randint(0, 5000, (rows, *model.input_shape[1:]))
    y = random.randint(0, 10, rows)
    arguments = {"batch_size": _BATCH, "shuffle": False, "verbose": 0}
    losses, seconds = [], []
    for epochs in (1, 1, 3):
        start = time.perf_counter()
        losses += model.fit(x, y, epochs=epochs, **arguments).history["loss"]
        seconds.append(time.perf_counter() - start)
    # Without what each call of `fit` takes.
    milliseconds = 1e3 * (seconds[2] - seconds[1]) / options.steps / 2
    weight = model.trainable_variables[0]._value
    return {
        "losses": losses[:3],
        "ms": round(milliseconds, 2),
        "device": str(getattr(weight, "device", "")).rpartition("/")[2],
        "jit": bool(model.jit_compile),
        "peak": _peak_mib(),
    }


def _peak_mib():
    """MiB of the first GPU that this process's tensors have had at a time."""
    # A chief's list of logical devices has those of its workers, too.
    if not tf.config.list_physical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] >> 20


def sums(options):
    """All-reduce of the dtypes that TensorFlow refuses on GPUs, and others."""
    strategy = strategy_of(options)
    replicas = strategy.num_replicas_in_sync

    @tf.function(autograph=False)
    def step(values):
        return strategy.run(lambda: strategy.extended.launcher().all_reduce(values))

    right = {}
    for dtype in (tf.int32, tf.int64, tf.bfloat16, tf.float16, tf.float32):
        values = tf.cast(tf.range(100_000) % 64, dtype)
        for total in strategy.experimental_local_results(step(values)):
            expected = tf.cast(values, tf.float32) * replicas
            right[dtype.name] = bool(tf.reduce_all(tf.cast(total, tf.float32) == expected))
    return {"replicas": replicas, "right": right, "good": all(right.values())}


def nccl(options):
    """NCCL in a group of one GPU: that its library is found and works."""
    with tf.device("/GPU:0"):
        values = tf.random.normal([1000])
        total = tf.raw_ops.CollectiveReduceV2(
            input=values,
            group_size=1,
            group_key=7,
            instance_key=7,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="nccl",
        )
    return {"good": bool(tf.reduce_all(total == values))}


def compressors(options):
    """Milliseconds to encode and decode a tensor, beside those of a copy of it."""
    kind = "CPU" if options.cpu else "GPU"
    found = {}
    size = options.width
    shape = [size // 1000, 1000]
    names = "bf16 fp16 int8 sign topk:0.01 randomk:0.01 powersgd:4".split()
    with tf.device(f"/{kind}:0"):
        gradient = tf.random.normal(shape)
        found["copy"] = _least_ms(lambda tensor: tensor + 1.0, gradient)
        for name in names:
            compressor = compression.get(name)
            state = compressor.init(shape, "float32")

            def there_and_back(tensor, compressor=compressor, state=state):
                step = tf.constant(0, tf.int64)
                payload, _ = compressor.encode(tensor, state, step)
                return compressor.decode(payload, shape, tf.float32, step)

            found[name] = _least_ms(there_and_back, gradient)
    return {"elements": size, "ms": found}


def _least_ms(function, tensor):
    function = tf.function(function, autograph=False)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        tf.reduce_sum(function(tensor)).numpy()
        times.append(time.perf_counter() - start)
    return round(1e3 * min(times), 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=["fit", "sums", "nccl", "compressors"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--logical", type=int, default=1)
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("--model", default="dense", choices=_MODELS)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--policy", default="float32")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--jit", default="auto")
    options = parser.parse_args()
    if options.cpu:
        options.width, options.steps = max(64, options.width // 64), 4
    devices("CPU" if options.cpu else "GPU", options.logical)
    result = globals()[options.check](options)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
