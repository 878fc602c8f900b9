"""One task of `benchmarks/pipeline.py` with Keras: trains in stages, with all-reduce, or alone."""

import json
import os
import sys
import time

# isort: split
import keras
import tensorflow as tf

from lab import meter
from lab.pipeline_work import WORKS


def make_strategy(given):
    """The method's strategy; does not return in workers of a pipeline."""
    method = given["method"]
    if method == "one_process":
        return tf.distribute.get_strategy()
    import keras_psplus as psp

    jobs, addresses = given["jobs"], given["addresses"]
    rank = given["rank"]
    cluster = {
        job: [address for name, address in zip(jobs, addresses) if name == job]
        for job in dict.fromkeys(jobs)
    }
    task = {"type": jobs[rank], "index": jobs[:rank].count(jobs[rank])}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    if method == "all_reduce":
        return psp.MultiWorkerMirroredStrategy()
    schedule, _, compression = method.partition(" ")
    return psp.PipelineStrategy(
        given["microbatches"],
        stages=given["stages"],
        schedule=schedule,
        activation_compression=compression or None,
    )


def make_model(work):
    inputs = outputs = keras.Input((work.widths[0],))
    for i, width in enumerate(work.widths[1:-1]):
        outputs = keras.layers.Dense(width, activation="relu", name=f"dense_{i}")(outputs)
    return keras.Model(inputs, keras.layers.Dense(work.widths[-1], name="head")(outputs))


def counted(strategy):
    """Bytes that a pipeline has counted by itself, forward and backward; None for others."""
    if not hasattr(strategy, "num_stages"):
        return None
    traffic = strategy.communication.traffic()
    return [
        sum(entry.wire_bytes for entry in traffic if entry.direction == direction)
        for direction in ("forward", "backward")
    ]


def main():
    given = json.loads(sys.argv[1])
    work, window = WORKS[given["work"]], given["window"]
    strategy = make_strategy(given)
    keras.utils.set_random_seed(1)
    begin = time.perf_counter()
    with strategy.scope():
        model = make_model(work)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
    leader = meter.Leader(given["jobs"], [0]) if given["rank"] == 0 else None
    found = {"times": []}

    class Windows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if leader is None or (batch + 1) % window:
                return
            now = time.perf_counter()
            if batch + 1 == window:
                found["first_window_s"] = now - begin
            if batch + 1 > given["warmup"]:
                found["times"].append(1000 * (now - self.last) / window)
            elif batch + 1 == given["warmup"]:
                self.before, self.counted = leader.now(), counted(strategy)
            self.last = now

    x, y = work.batch()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2).with_options(options)
    steps = given["warmup"] + given["windows"] * window
    callback = Windows()
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[callback])
    if leader is not None:
        after, count = leader.now(), given["windows"] * window
        for key in ("sent", "received", "processor"):
            pairs = zip(callback.before[key], after[key])
            found[key] = [round((b - a) / count) for a, b in pairs]
        if callback.counted is not None:
            pairs = zip(callback.counted, counted(strategy))
            found["counted"] = [round((b - a) / count) for a, b in pairs]
        print("\n" + meter.RESULT + json.dumps(found), flush=True)
        leader.say_done()


if __name__ == "__main__":
    main()
