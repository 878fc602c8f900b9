"""A job whose workers read the data: every element is to be seen once an epoch.

worker_data_job.py FOLDER POLICIES [SECONDS_PER_STEP]

FOLDER has text files with a number in each line. Metrics that add up the numbers and their squares
tell which ones were seen.
"""

import pathlib
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import tensorflow as tf

import keras_psplus as psp

folder, policies = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
strategy = psp.ParameterServerStrategy(startup_timeout=60)
# Of the policies of `tf.data.experimental.AutoShardPolicy`.
STEPS_PER_EXECUTION = {"FILE": 3, "DATA": 1}


class Seen(keras.metrics.Sum):
    def __init__(self, power):
        super().__init__(name=f"power_{power}")
        self.power = power

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.cast(y_true, "float32") ** self.power)


class Pace(keras.callbacks.Callback):
    """Lets the test see how far the job is."""

    calls = 0

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(pause)
        self.calls += 1
        if batch % 20 == 0:
            print(f"batch {batch}", flush=True)


def numbers(policy, repeat=False):
    files = tf.data.Dataset.list_files(str(folder / "*.txt"))
    lines = files.interleave(tf.data.TextLineDataset).shuffle(30)
    if repeat:
        lines = lines.repeat()
    batches = lines.batch(4).map(lambda text: tf.strings.to_number(text)[:, None])
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    return batches.map(lambda x: (x / 1000, x)).with_options(options)


def distributed(policy):
    """Distributed by the script: a dataset, or a function that makes each worker its own."""
    if policy == "DISTRIBUTED":
        return strategy.experimental_distribute_dataset(numbers("OFF"))

    def make(context):
        assert context.num_replicas_in_sync == 1
        return numbers("OFF").shard(context.num_input_pipelines, context.input_pipeline_id)

    return strategy.distribute_datasets_from_function(make)


def train_on_distributed(policy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        metrics = [Seen(0), Seen(1), Seen(2)]
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics)
    data = distributed(policy)
    history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
    evaluated = model.evaluate(distributed(policy), verbose=0, return_dict=True)
    for name in ("power_0", "power_1", "power_2"):
        assert history[f"val_{name}"] == history[name], history
        print(f"{policy} {name}: {history[name]} {evaluated[name]}", flush=True)
    print(f"{policy} predicted {len(model.predict(data, verbose=0))}", flush=True)
    weighed = model.fit(
        data, class_weight={n: 1.0 for n in range(400)}, steps_per_epoch=3, verbose=0
    )
    assert weighed.history["power_0"] == [12], weighed.history


def counting_model(steps_per_execution):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(0.0),
            "mse",
            metrics=[Seen(0), Seen(1), Seen(2)],
            steps_per_execution=steps_per_execution,
        )
    return model


def train(policy, steps_per_execution):
    model = counting_model(steps_per_execution)
    pace = Pace()
    history = model.fit(numbers(policy), epochs=2, verbose=0, callbacks=[pace]).history
    evaluated = model.evaluate(numbers(policy), verbose=0, return_dict=True)
    label = f"{policy} {steps_per_execution}"
    for name in ("power_0", "power_1", "power_2"):
        print(f"{label} {name}: {history[name]} {evaluated[name]}", flush=True)
    print(f"{label} calls: {pace.calls}", flush=True)
    endless = model.fit(numbers(policy, True), steps_per_epoch=30, epochs=2, verbose=0).history
    print(f"{label} endless: {endless['power_0']}", flush=True)
    return model


for policy in policies:
    if policy in STEPS_PER_EXECUTION:
        model = train(policy, STEPS_PER_EXECUTION[policy])
    else:
        train_on_distributed(policy)
print(f"predicted {len(model.predict(numbers('DATA'), verbose=0))}", flush=True)

if not pause:
    model = counting_model(1)
    lengths = iter((3, 9, 2))

    def batches():
        for _ in range(next(lengths)):
            yield [[1.0]], [[1.0]]

    spec = tf.TensorSpec((1, 1))
    changing = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    seen = model.fit(changing, epochs=3, verbose=0).history["power_0"]
    print(f"changing lengths: {seen}", flush=True)

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    servers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(2)]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    shuffled = tf.data.Dataset.range(1, 332).shuffle(331).batch(4)
    shuffled = shuffled.map(lambda n: (tf.cast(n, "float32")[:, None] / 1000, n[:, None])).apply(
        service.distribute("distributed_epoch", dispatcher.target, job_name="numbers")
    )
    seen = model.fit(shuffled.with_options(options), epochs=3, verbose=0).history
    print(f"service: {seen['power_0']} {seen['power_1']}", flush=True)

table = keras.layers.StringLookup(vocabulary=["1", "2"])
with_table = numbers("DATA").map(
    lambda x, y: (x, tf.cast(table(tf.strings.as_string(y)), tf.float32))
)
model.fit(with_table.take(3), verbose=0)
print("done", flush=True)
