"""Trains a model in stages; the chief prints what it finds.

training_job.py FOLDER [--epochs N] [--pause SECONDS] [--backup] [--stages auto|patterns]
    [--schedule gpipe|1f1b|pipedream] [--pipelines N] [--compression NAME]
"""

import argparse
import hashlib
import pathlib
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp

PATTERNS = [["embedding", "recurrent"], ["dense*", "dropout"]]


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--backup", action="store_true")
    parser.add_argument("--stages", default="auto")
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--compression")
    parser.add_argument("--heartbeat", type=float, default=20.0)
    return parser.parse_args()


def make(strategy):
    layers = keras.layers
    with strategy.scope():
        stack = [layers.Embedding(40, 8, name="embedding")]
        stack += [layers.SimpleRNN(16, name="recurrent")]
        stack += [layers.Dense(32, activation="relu"), layers.Dropout(0.2), layers.Dense(3)]
        model = keras.Sequential(stack)
        model.compile(
            keras.optimizers.Adam(0.01, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


class Steps(keras.callbacks.Callback):
    def __init__(self, pause):
        super().__init__()
        self._pause, self._count = pause, 0

    def on_train_batch_end(self, batch, logs=None):
        self._count += 1
        print(f"step {self._count}", flush=True)
        time.sleep(self._pause)


def main():
    args = parse()
    keras.utils.set_random_seed(5)
    stages = PATTERNS if args.stages == "patterns" else "auto"
    strategy = psp.PipelineStrategy(
        microbatches=3,
        stages=stages,
        schedule=args.schedule,
        pipelines=args.pipelines,
        compression=args.compression,
        heartbeat_timeout=args.heartbeat,
        startup_timeout=60,
    )
    model = make(strategy)
    random = np.random.default_rng(0)
    x, y = random.integers(0, 40, (70, 6)), random.integers(0, 3, 70)
    callbacks = [Steps(args.pause)]
    if args.backup:
        callbacks.append(keras.callbacks.BackupAndRestore(args.folder / "backup", save_freq=3))
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=args.epochs,
        verbose=2,
        shuffle=args.backup,
        callbacks=callbacks,
    )
    print("losses", [f"{loss:.6f}" for loss in history.history["loss"]], flush=True)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    places = {v.path: v.value.device for v in [*model.variables, *model.optimizer.variables]}
    for path, device in places.items():
        print(f"{path} is on {device}", flush=True)
    args.folder.mkdir(exist_ok=True)
    model.save(args.folder / "model.keras")


if __name__ == "__main__":
    main()
