"""One task with Keras 3 and keras_psplus, or with tf_keras.

It trains, or serves those that do.
"""

import itertools
import json
import os
import socket
import time

import tensorflow as tf

from lab import perceptron
from lab.meter import Meter
from lab.task import Task

_SHARDED_BYTES = 1 << 20  # tf_keras cuts larger variables up


def import_keras(library):
    if library == "tf_keras":
        import tf_keras as keras
    else:
        import keras
    return keras


def make_strategy(task):
    """The method's strategy; does not return in tasks that serve."""
    if task.path != "alone":
        cluster = {job: task.addresses_of(job) for job in dict.fromkeys(task.jobs)}
        place = {"type": task.job, "index": task.index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": place})
    if task.library == "keras_psplus":
        from lab import entries

        return entries.make(task.name)
    if task.path == "alone":
        return tf.distribute.get_strategy()
    if task.path == "all_reduce":
        return tf.distribute.MultiWorkerMirroredStrategy()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    if task.job != "chief":
        tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
        ).join()
    for address in itertools.chain(task.addresses_of("worker"), task.addresses_of("ps")):
        _wait_for(address)
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        _SHARDED_BYTES, len(task.addresses_of("ps"))
    )
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def _wait_for(address):
    """TensorFlow's strategy would not wait for a server that is not up yet."""
    host, port = address.rsplit(":", 1)
    while True:
        try:
            socket.create_connection((host, int(port)), 2).close()
            return
        except OSError:
            time.sleep(0.1)


def make_model(keras, work, together, dynamic=False):
    if hasattr(work, "filters"):
        inputs, outputs = _convolutions(keras, work)
        widths = work.widths
    elif hasattr(work, "blocks"):
        inputs, outputs = _transformer(keras, work)
        widths = (work.classes,)
    elif hasattr(work, "rows"):
        inputs = keras.Input((work.ids,), dtype="int64")
        rows = _table(keras, work, dynamic)(inputs)
        outputs = keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, 1))(rows)
        widths = work.widths
    else:
        inputs = outputs = keras.Input(work.widths[:1])
        widths = work.widths[1:]
    return perceptron.compiled(
        keras, inputs, outputs, widths, work.learning_rate, steps_per_execution=together
    )


def _table(keras, work, dynamic):
    if not dynamic:
        return keras.layers.Embedding(work.rows, work.dim)
    import keras_psplus

    return keras_psplus.layers.DynamicEmbedding(work.dim)


def _convolutions(keras, work):
    layers = keras.layers
    inputs = outputs = keras.Input((work.side, work.side, 1))
    for filters in work.filters:
        outputs = layers.Conv2D(filters, 3, padding="same", activation="relu")(outputs)
        outputs = layers.MaxPooling2D()(outputs)
    return inputs, layers.Flatten()(outputs)


def _transformer(keras, work):
    layers = keras.layers
    inputs = keras.Input((work.ids,), dtype="int64")
    outputs = layers.Embedding(work.rows, work.dim)(inputs)
    for _ in range(work.blocks):
        attended = layers.MultiHeadAttention(work.heads, work.dim // work.heads)(outputs, outputs)
        outputs = layers.LayerNormalization()(layers.Add()([outputs, attended]))
        hidden = layers.Dense(work.hidden, activation="relu")(outputs)
        hidden = layers.Dense(work.dim)(hidden)
        outputs = layers.LayerNormalization()(layers.Add()([outputs, hidden]))
    return inputs, layers.GlobalAveragePooling1D()(outputs)


def make_dataset(work, workers):
    """Whole batches, of which nothing is left to do but to share them out."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices(work.batches(workers)).repeat()
    return dataset.prefetch(2).with_options(options)


def train(task, keras, strategy, work, plan, windows):
    """Trains for so many windows."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model(keras, work, plan["together"], plan["dynamic"])
    communication = getattr(strategy, "communication", None)
    counted = (lambda: communication.wire_bytes) if communication else None
    meter = Meter(task.leader, task.rank, plan, counted)
    # Under parameter servers, steps end at any time; only those of an epoch are waited for.
    by_epochs = task.path == "parameter_server"
    window = plan["window"]

    class Windows(keras.callbacks.Callback):
        if by_epochs:  # And tf_keras refuses callbacks at steps.

            def on_epoch_end(self, epoch, logs=None):
                meter.window_ended()

        else:

            def on_train_batch_end(self, batch, logs=None):
                if (batch + 1) % window == 0:
                    meter.window_ended()

    # Each step of a worker that waits for nobody has a batch of its own.
    data = make_dataset(work, task.workers if task.waits and task.path != "alone" else 1)
    if by_epochs and task.library == "tf_keras":
        data = keras.utils.experimental.DatasetCreator(lambda context: make_dataset(work, 1))
    steps = window if task.waits else window * task.workers
    epochs, steps = (windows, steps) if by_epochs else (1, windows * window)
    model.fit(data, steps_per_epoch=steps, epochs=epochs, verbose=0, callbacks=[Windows()])


def main():
    task = Task()
    strategy = make_strategy(task)
    keras = import_keras(task.library)
    for work, plan, windows in task.works():
        train(task, keras, strategy, work, plan, windows)


if __name__ == "__main__":
    main()
