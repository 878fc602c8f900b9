"""One process of `parameter_server.py`: a task of a cluster with a chief, workers and ps.

Workers and ps serve. The chief trains each model in turn and prints, for windows of many steps, the
time until all of a window's steps were done. All libraries run the code below; only the module that
`keras` names, the strategy and the loop differ.
"""

import argparse
import itertools
import json
import os
import pathlib
import socket
import time

import numpy as np
import tensorflow as tf

DIGITS = pathlib.Path(__file__).parent.parent / "examples" / "digits.npz"
LOOPBACK = pathlib.Path("/sys/class/net/lo/statistics/tx_bytes")
CLASSES = 10


def take_cores(task, shares, chief_alone):
    """Pins this task to its share of the cores.

    Workers are first, then ps, the chief from the end. So a single worker has its share to itself;
    on few cores the chief shares the ps's core, not the worker's. With `chief_alone` it has the
    last core, and all others share the rest.
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = min(shares, len(cores))
    job, index = task["task"]["type"], task["task"]["index"]
    place = {"worker": index, "ps": len(task["cluster"]["worker"]) + index, "chief": -1}[job]
    mine = cores[place % shares :: shares]
    if chief_alone:
        mine = cores[-1:] if job == "chief" else cores[:-1]
    os.sched_setaffinity(0, mine)
    # The servers take no notice of tf.config: their pools are as large as these say.
    os.environ["TF_NUM_INTRAOP_THREADS"] = str(len(mine))
    # With a single one, an operation that waits for a peer would hold up all others.
    os.environ["TF_NUM_INTEROP_THREADS"] = str(max(2, len(mine)))


def serve():
    """Serves the chief until it ends, in the same way for every library."""
    from keras_psplus.cluster import config, serving

    serving.serve(config.read_task_config(), chief_gone=0.5)
    os._exit(0)  # TensorFlow's server cannot be stopped in any other way.


def make_strategy(library, cluster):
    if library in ("keras", "keras_dataset"):
        import keras_psplus

        return keras_psplus.ParameterServerStrategy()
    for address in itertools.chain(cluster["worker"], cluster["ps"]):
        host, port = address.rsplit(":", 1)
        while True:  # TensorFlow's strategy would not wait for a server that is not up yet.
            try:
                socket.create_connection((host, int(port)), 2).close()
                break
            except OSError:
                time.sleep(0.1)
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    )


def make_data(model):
    """Inputs and labels; all of a model's batches are cut from these."""
    if model == "lstm":
        rng = np.random.default_rng(1)
        x = rng.normal(size=(2048, 10, 16)).astype("float32")
        return x, (x.sum((1, 2)) > 0).astype("int64")
    with np.load(DIGITS) as file:
        x = file["x"].astype("float32") / 16
        y = file["y"].astype("int64")
    return x.reshape((-1, 8, 8, 1) if model == "digits" else (-1, 64)), y


def make_dataset(data, batch_size, policy=tf.data.experimental.AutoShardPolicy.AUTO):
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0]), seed=1).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.batch(batch_size, drop_remainder=True).prefetch(2).with_options(options)


def build_model(keras, model):
    layers = keras.layers
    if model == "digits":  # 356,000 weights: pulls and pushes of 1.4 MB
        from step_time_task import build_model

        return build_model(keras)
    if model == "stub":  # a step that computes nothing and asks no ps: the chief's part alone
        return stub_model(keras)
    if model == "tiny":  # what a step costs that computes next to nothing: the chief's part
        return keras.Sequential([layers.Input((64,)), layers.Dense(CLASSES)])
    if model == "many_layers":  # 40 small variables: what each one costs, whatever its size
        hidden = [layers.Dense(32, activation="relu") for _ in range(19)]
        return keras.Sequential([layers.Input((64,)), *hidden, layers.Dense(CLASSES)])
    # The loop over 10 steps uses the recurrent weights in each of them.
    return keras.Sequential([layers.Input((10, 16)), layers.LSTM(32), layers.Dense(CLASSES)])


def stub_model(keras):
    """A model whose step only counts: its workers answer at once, however many there are."""

    class Stub(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            self._loss_tracker.update_state(tf.reduce_mean(x))
            scores = tf.one_hot(y, CLASSES)
            return self.compute_metrics(x, y, scores)

    return Stub([keras.layers.Input((64,)), keras.layers.Dense(CLASSES)])


class Windows:
    """Costs of each window of steps: time, processor time by job, loopback bytes."""

    def __init__(self, count_bytes):
        pids = json.loads(pathlib.Path(os.environ["BENCHMARK_PIDS"]).read_text())
        self._pids = [(task.split("-")[0], pid) for task, pid in pids.items()]
        self._count_bytes = count_bytes
        self.all = []

    def begin(self):
        self._began = self._now()

    def end(self):
        began, now = self._began, self._now()
        self.all.append({key: now[key] - began[key] for key in now})

    def _now(self):
        now = {"chief": 0, "worker": 0, "ps": 0}
        for job, pid in self._pids:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            now[job] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        now["bytes"] = int(LOOPBACK.read_text()) if self._count_bytes else 0
        return {**now, "wall": time.perf_counter()}


def objects(keras):
    """Optimizer and loss, of the same settings in every library."""
    return (
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def run_fit(keras, strategy, args, name, steps_per_execution, windows):
    """Trains by `fit`, an epoch for each window; its end waits for all steps.

    `keras` sends batches from the chief, `keras_dataset` and `tf_keras` read them on workers.
    """

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            windows.begin()

        def on_epoch_end(self, epoch, logs=None):
            windows.end()

    with strategy.scope():
        model = build_model(keras, name)
        optimizer, loss = objects(keras)
        model.compile(
            optimizer=optimizer,
            loss=loss,
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
    data = make_data(name)
    policies = tf.data.experimental.AutoShardPolicy
    policy = policies.DATA if args.library == "keras_dataset" else policies.AUTO
    dataset = make_dataset(data, args.batch_size, policy)
    if args.library == "tf_keras":
        dataset = keras.utils.experimental.DatasetCreator(
            lambda context: make_dataset(data, args.batch_size)
        )
    history = model.fit(
        dataset,
        steps_per_epoch=args.steps,
        epochs=args.warmup + args.windows,
        verbose=0,
        callbacks=[Epochs()],
    )
    steps, asked = int(model.optimizer.iterations.numpy()), args.steps * len(windows.all)
    if steps != asked and name != "stub":
        raise RuntimeError(f"{asked} steps were asked for. Received: {steps}")
    return history.history["loss"][-1]


def run_bare(keras, strategy, args, name, steps_per_execution, windows):
    """The least that the coordinator can do: schedules all steps of a window, then joins.

    One closure takes `steps_per_execution` steps and returns the last one's loss, which is fetched.
    There are no metrics. `bare` sends batches from the chief, `bare_dataset` reads them on workers.
    The optimizer's counter is no check here: Keras 3 reads, adds and writes it, so that under the
    stock strategy the steps of several workers are lost from it.
    """
    with strategy.scope():
        model = build_model(keras, name)
        optimizer, loss_of = objects(keras)
        optimizer.build(model.trainable_variables)
    weights = [v.value for v in model.trainable_variables]

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, weights), model.trainable_variables)
        return loss

    @tf.function(autograph=False)
    def run(batch):  # A function of its own, so that it is traced once only.
        return strategy.run(step, args=(batch,))

    @tf.function(autograph=False)
    def closure(source):
        for i in range(steps_per_execution):
            loss = run(next(source) if args.library == "bare_dataset" else source[i])
        return loss

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    data = make_data(name)
    if args.library == "bare_dataset":
        iterator = iter(
            coordinator.create_per_worker_dataset(lambda: make_dataset(data, args.batch_size))
        )
        arguments = itertools.repeat(iterator)
    else:
        batches = iter(make_dataset(data, args.batch_size))
        arguments = iter(lambda: list(itertools.islice(batches, steps_per_execution)), None)
    function = closure
    for _ in range(args.warmup + args.windows):
        windows.begin()
        losses = []  # Whatever is held is fetched.
        for _ in range(args.steps // steps_per_execution):
            losses.append(coordinator.schedule(function, args=(next(arguments),)))
            if function is closure and args.library == "bare":
                # Traced by now. It spares looking for the trace of each closure's arguments.
                function = closure.get_concrete_function(next(arguments))
        coordinator.join()
        loss = float(losses[-1].fetch())
        windows.end()
    return loss


def measure(keras, strategy, args, name, steps_per_execution):
    """Trains one model; times are milliseconds per step, all workers together."""
    windows = Windows(args.bytes)
    run = run_bare if args.library.startswith("bare") else run_fit
    loss = run(keras, strategy, args, name, steps_per_execution, windows)
    measured = windows.all[args.warmup :]
    jobs = ("chief", "worker", "ps")
    return {
        "model": name,
        "steps_per_execution": steps_per_execution,
        "windows": [round(w["wall"] * 1000 / args.steps, 4) for w in measured],
        "processor": {j: [round(w[j] * 1000 / args.steps, 2) for w in measured] for j in jobs},
        "bytes": [round(w["bytes"] / args.steps) for w in measured],
        "first_seconds": round(windows.all[0]["wall"], 2),  # with all tracing
        "loss": float(loss),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--steps_per_execution", type=int, nargs="+", required=True)
    parser.add_argument("--warmup", type=int, required=True, help="windows")
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps in a window")
    parser.add_argument("--shares", type=int, required=True, help="parts to split the cores into")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--chief_alone", action="store_true")
    args = parser.parse_args()
    task = json.loads(os.environ["TF_CONFIG"])
    take_cores(task, args.shares, args.chief_alone)
    if task["task"]["type"] != "chief":
        serve()

    strategy = make_strategy(args.library, task["cluster"])
    if args.library == "tf_keras":
        import tf_keras as keras
    else:
        import keras
    for name, steps_per_execution in itertools.product(args.models, args.steps_per_execution):
        keras.utils.set_random_seed(1)
        result = measure(keras, strategy, args, name, steps_per_execution)
        result.update(
            library=args.library,
            versions={"tensorflow": tf.__version__, keras.__name__: keras.__version__},
        )
        print("result: " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
