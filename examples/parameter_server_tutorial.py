"""The shape of TensorFlow's tutorial "Parameter server training", on Keras 3.

    keras-psplus run --workers 2 --ps 2 examples/parameter_server_tutorial.py
    python examples/parameter_server_tutorial.py

The first runs in a cluster of processes, the second in one of threads of a single process, as the
tutorial does. Against a script for TensorFlow's own strategy under Keras 2, another line makes the
strategy, and `fit` takes the dataset itself where Keras 2 wanted a `DatasetCreator`.

Somebody names three foods and says whether they would come to dinner. They would if there is mango.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.in_process import InProcessCluster

FOODS = ["mango", "noodles", "okra", "pancake", "quinoa", "rice", "soup", "tofu"]
ANSWERS = ["no", "yes"]
BATCH_SIZE = 32
STEPS_PER_EPOCH = 20
# Of threads; a cluster of processes has as many as it was started with.
NUM_WORKERS, NUM_PS = 2, 2


def make_strategy():
    """Makes the strategy; does not return in workers and ps of separate processes."""
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    resolver, num_ps = None, len(cluster.get("ps", []))
    if not cluster:
        threads = InProcessCluster(NUM_WORKERS, NUM_PS)
        threads.start()
        resolver, num_ps = threads.cluster_resolver, NUM_PS
    # The table below is larger than this, and is cut into a part for each parameter server.
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=64 << 10, max_shards=num_ps
    )
    # The line that differs: tf.distribute.ParameterServerStrategy(...) under Keras 2.
    return psp.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def examples(count, seed):
    """Returns foods, strings of shape (count, 3), and answers, strings of shape (count, 1)."""
    draw = random.Random(seed)
    foods = [draw.sample(FOODS, 3) for _ in range(count)]
    answers = [["yes" if "mango" in three else "no"] for three in foods]
    return np.array(foods), np.array(answers)


def make_lookups():
    """The layers that number foods and answers; to be made under the strategy's scope."""
    foods = keras.layers.StringLookup(vocabulary=FOODS, mask_token=None)
    answers = keras.layers.StringLookup(vocabulary=ANSWERS, num_oov_indices=0, mask_token=None)
    return foods, answers


def rating_layers(foods_lookup):
    return [
        keras.layers.Embedding(foods_lookup.vocabulary_size(), 4096, name="table"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]


def fit(strategy, epochs, directory):
    """Runs the tutorial's first half, Model.fit; returns the saved model's accuracy."""
    with strategy.scope():
        foods_lookup, answers_lookup = make_lookups()
        # The model numbers the foods itself, so that who loads it needs nothing but strings.
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="string"),
                foods_lookup,
                *rating_layers(foods_lookup),
            ]
        )
        model.compile(
            keras.optimizers.RMSprop(0.01),
            "binary_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=2,
        )
    data = tf.data.Dataset.from_tensor_slices(examples(200, seed=1))
    data = data.shuffle(200).repeat().batch(BATCH_SIZE)
    data = data.map(lambda foods, answers: (foods, answers_lookup(answers))).prefetch(2)
    callbacks = [
        keras.callbacks.ModelCheckpoint(directory / "checkpoint.{epoch}.keras"),
        # A restarted cluster goes on with the epoch that was interrupted.
        keras.callbacks.BackupAndRestore(directory / "backup"),
    ]
    if importlib.util.find_spec("tensorboard"):
        callbacks.append(keras.callbacks.TensorBoard(directory / "log"))
    model.fit(data, epochs=epochs, steps_per_epoch=STEPS_PER_EPOCH, callbacks=callbacks, verbose=2)
    model.save(directory / "model.keras")

    loaded = keras.models.load_model(directory / "model.keras")
    foods, answers = examples(100, seed=2)
    found = loaded.predict(tf.constant(foods), verbose=0) > 0.5
    return np.mean(found == (answers == "yes"))


def own_loop(strategy, epochs):
    """The tutorial's second half: a training loop of one's own, with a ClusterCoordinator.

    Here each worker has a dataset of its own, which is made and shuffled where the steps run.

    Returns:
        The accuracy on other examples, the steps taken and the examples that the metric has seen in
        the last epoch.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        foods_lookup, answers_lookup = make_lookups()
        model = keras.Sequential([keras.Input((3,), dtype="int64"), *rating_layers(foods_lookup)])
        optimizer = keras.optimizers.RMSprop(0.01)
        # Keras 3 wants an optimizer's variables to be there before its step is traced.
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.BinaryAccuracy()
    loss_of_each = keras.losses.BinaryCrossentropy(reduction=None)

    def numbered(foods, answers):
        return foods_lookup(foods), answers_lookup(answers)

    def make_dataset(_):
        data = tf.data.Dataset.from_tensor_slices(examples(200, seed=1))
        return data.shuffle(200).repeat().batch(BATCH_SIZE).map(numbered)

    @tf.function
    def make_worker_dataset():
        return strategy.distribute_datasets_from_function(make_dataset)

    @tf.function
    def step(iterator):
        def replica_step(foods, answers):
            with tf.GradientTape() as tape:
                predicted = model(foods, training=True)
                loss = tf.nn.compute_average_loss(loss_of_each(answers, predicted))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            accuracy.update_state(answers, predicted)
            return loss

        losses = strategy.run(replica_step, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    iterators = iter(coordinator.create_per_worker_dataset(make_worker_dataset))
    for epoch in range(epochs):
        accuracy.reset_state()
        for _ in range(STEPS_PER_EPOCH):
            loss = coordinator.schedule(step, args=(iterators,))
        coordinator.join()
        print(f"epoch {epoch}: accuracy {accuracy.result():.3f}, last loss {loss.fetch():.4f}")

    seen = int(accuracy.count)
    accuracy.reset_state()
    foods, answers = numbered(*map(tf.constant, examples(100, seed=2)))
    accuracy.update_state(answers, model(foods))
    return float(accuracy.result()), int(optimizer.iterations), seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("dinner"))
    parser.add_argument("--own_loop", action="store_true", help="run the second half, too")
    args = parser.parse_args()

    strategy = make_strategy()
    # Only the chief comes here.
    accuracy = fit(strategy, args.epochs, args.directory)
    print("bytes on each parameter server:", *strategy.extended.placement.bytes_on_ps)
    print(f"fit: accuracy={accuracy:.3f} workers={strategy.num_workers}", flush=True)
    if args.own_loop:
        accuracy, steps, seen = own_loop(strategy, args.epochs)
        print(f"own_loop: accuracy={accuracy:.3f} steps={steps} seen={seen}", flush=True)


if __name__ == "__main__":
    main()
