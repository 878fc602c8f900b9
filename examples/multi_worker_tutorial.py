"""The shape of TensorFlow's tutorial "Multi-worker training with Keras", on Keras 3.

    keras-psplus run --workers 2 examples/multi_worker_tutorial.py --epochs 3

Every worker runs this same script with its own TF_CONFIG. Against a script for TensorFlow's own
MultiWorkerMirroredStrategy under Keras 2, only the line that makes the strategy differs. The images
are the digits beside this file, enlarged to MNIST's 28 x 28 pixels, so that nothing is downloaded.
"""

import argparse
import json
import os
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

PER_WORKER_BATCH_SIZE = 32
STEPS_PER_EPOCH = 20


def mnist_like_arrays():
    """Returns (x_train, y_train), (x_test, y_test); images are (n, 28, 28), 0 to 255."""
    with np.load(pathlib.Path(__file__).with_name("digits.npz")) as file:
        small = file["x"].reshape(-1, 8, 8)
        labels = file["y"].astype(np.int64)
    # Three times as large and with a margin of two pixels: 8 * 3 + 2 * 2 = 28.
    large = small.repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.float32) * (255 / 16)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


def mnist_like_datasets(global_batch_size):
    """The training dataset, batched by the *global* batch size, and the test dataset.

    The strategy divides each batch among the workers.
    """
    (x_train, y_train), (x_test, y_test) = mnist_like_arrays()
    train = tf.data.Dataset.from_tensor_slices((x_train / 255, y_train))
    train = train.shuffle(len(x_train), seed=1).repeat().batch(global_batch_size)
    test = tf.data.Dataset.from_tensor_slices((x_test / 255, y_test)).batch(global_batch_size)
    return train, test


def build_and_compile_cnn_model(learning_rate):
    model = keras.Sequential(
        [
            keras.Input(shape=(28, 28)),
            keras.layers.Reshape(target_shape=(28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(learning_rate),
        metrics=["accuracy"],
    )
    return model


def own_task():
    """This process's (type, index) in TF_CONFIG; (None, 0) without a cluster."""
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
    return task.get("type"), int(task.get("index", 0))


def is_chief(task_type, task_index):
    return task_type in (None, "chief") or (task_type == "worker" and task_index == 0)


def write_path(path, task_type, task_index):
    """Path that this process saves to.

    All processes save, since reading the weights may involve all workers, but only the chief's
    files are kept.
    """
    if is_chief(task_type, task_index):
        return path
    folder = tempfile.mkdtemp(prefix=f"{task_type}_{task_index}_")
    return pathlib.Path(folder) / path.name


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("checkpoints"))
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)

    # The line that differs: tf.distribute.MultiWorkerMirroredStrategy() under Keras 2.
    strategy = psp.MultiWorkerMirroredStrategy()

    task = own_task()
    global_batch_size = PER_WORKER_BATCH_SIZE * strategy.num_replicas_in_sync
    train, test = mnist_like_datasets(global_batch_size)

    # Everything that makes variables goes under the scope.
    with strategy.scope():
        model = build_and_compile_cnn_model(args.learning_rate)

    callbacks = [
        # A restarted cluster goes on with the epoch that was interrupted.
        keras.callbacks.BackupAndRestore(str(args.directory / "backup")),
        keras.callbacks.ModelCheckpoint(
            str(write_path(args.directory / "latest.weights.h5", *task)), save_weights_only=True
        ),
    ]
    model.fit(
        train,
        epochs=args.epochs,
        steps_per_epoch=STEPS_PER_EPOCH,
        validation_data=test,
        callbacks=callbacks,
        verbose=1 if is_chief(*task) else 0,
    )

    path = write_path(args.directory / "model.keras", *task)
    model.save(path)
    # Loaded outside of the scope: every process evaluates its own copy, on all of the test data.
    with psp.single_process():
        loaded = keras.models.load_model(path)
        loss, accuracy = loaded.evaluate(test, verbose=0)
    if is_chief(*task):
        print(f"tutorial: accuracy={accuracy:.4f} loss={loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
