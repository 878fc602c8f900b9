"""One task of `hybrid.py`: trains with Keras 3 or tf_keras, or serves those that do."""

import itertools
import json
import os
import socket
import time

import tensorflow as tf
from hybrid_arguments import CLASSES, DIM, HIDDEN, IDS, RATE, addresses, batches, parse
from hybrid_meter import Meter

INT8 = {"row_compression": "int8", "pull_compression": "int8"}
HYBRID = {
    "hybrid": {},
    "hybrid prefetch": {"prefetch": True},
    "hybrid bf16": {"row_compression": "bf16", "pull_compression": "bf16"},
    "hybrid int8": INT8,
    "hybrid int8 prefetch": {**INT8, "prefetch": True},
}


def tf_config(args):
    """This task's TF_CONFIG, a dict."""
    jobs = [task.partition("=")[0] for task in args.tasks]
    job = jobs[args.rank]
    return {
        "cluster": {name: addresses(args, name) for name in dict.fromkeys(jobs)},
        "task": {"type": job, "index": jobs[: args.rank].count(job)},
    }


def make_strategy(args):
    if args.method == "alone":
        return tf.distribute.get_strategy()
    config = tf_config(args)
    os.environ["TF_CONFIG"] = json.dumps(config)
    if args.library == "psp":
        import keras_psplus

        if args.method == "all-reduce":
            return keras_psplus.MultiWorkerMirroredStrategy()
        # In tasks that serve this does not return.
        options = HYBRID[args.method]
        return keras_psplus.HybridStrategy(placement="parameter_server", **options)
    if args.method == "all-gather":
        return tf.distribute.MultiWorkerMirroredStrategy()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    if config["task"]["type"] != "chief":
        tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
        ).join()
    for address in itertools.chain(addresses(args, "worker"), addresses(args, "ps")):
        _wait_for(address)
    servers = len(addresses(args, "ps"))
    return tf.distribute.ParameterServerStrategy(
        resolver,
        variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
            1 << 20, servers
        ),
    )


def _wait_for(address):
    """TensorFlow's strategy would not wait for a server that is not up yet."""
    host, port = address.rsplit(":", 1)
    while True:
        try:
            socket.create_connection((host, int(port)), 2).close()
            return
        except OSError:
            time.sleep(0.1)


def make_model(keras, table_size):
    ids = keras.Input((IDS,), dtype="int64")
    rows = keras.layers.Embedding(table_size, DIM)(ids)
    features = keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, 1))(rows)
    hidden = keras.layers.Dense(HIDDEN, activation="relu")(features)
    model = keras.Model(ids, keras.layers.Dense(CLASSES)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss)
    return model


def make_dataset(args, examples):
    """Whole batches, of which nothing is left to do but to share them out."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices(batches(args, examples)).repeat()
    return dataset.prefetch(2).with_options(options)


def fit(keras, model, args, workers):
    """Trains; returns the meter's results."""
    meter = Meter(args)
    by_windows = args.method == "ps"  # Its steps end at any time; those of an epoch are waited for.

    class Steps(keras.callbacks.Callback):
        if by_windows:  # tf_keras refuses callbacks at steps here.

            def on_epoch_end(self, epoch, logs=None):
                meter.ended(args.window)

        else:

            def on_train_batch_end(self, batch, logs=None):
                meter.ended()

    steps = args.warmup + args.steps
    if by_windows:
        # As many steps of each worker, each with a batch of its own.
        data = keras.utils.experimental.DatasetCreator(
            lambda context: make_dataset(args, args.batch_size).shuffle(8)
        )
        epochs, steps = steps // args.window, args.window * workers
    else:
        data, epochs = make_dataset(args, args.batch_size * workers), 1
    leads = args.method == "ps" or args.rank == 0
    model.fit(
        data,
        steps_per_epoch=steps,
        epochs=epochs,
        verbose=0,
        callbacks=[Steps()] if leads else [],
    )
    return meter.results


def main():
    args = parse(__doc__.splitlines()[0])
    strategy = make_strategy(args)
    if args.library == "tf_keras":
        import tf_keras as keras
    else:
        import keras
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model(keras, args.table_size)
    results = fit(keras, model, args, len(addresses(args, "worker")))
    print("result: " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
