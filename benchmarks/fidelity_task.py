"""One process of `fidelity.py`: trains one task by one method, and with one seed.

Two logical CPU devices are two replicas of the strategy: each computes the gradient of its half of
the batch and compresses it, and the same collectives carry it that carry it between workers. Or
they are two stages of a pipeline.

Learning rates fall to zero along half a cosine, so that a run ends on a plateau whatever it was
that slowed it down.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable

import keras
import tensorflow as tf

import keras_psplus
from keras_psplus.cluster.in_process import logical_devices
from keras_psplus.compression import Int8, PowerSGD, TopK
from keras_psplus.updates import Accumulate, DiLoCo, LocalSGD

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import characters  # noqa: E402
import digits  # noqa: E402
import ngram_embedding  # noqa: E402

REPLICAS = 2
# Those that are not named by what `compression=` takes.
COMPRESSIONS = {
    "none": None,
    "int8, stochastic": Int8(stochastic=True),
    "topk:0.01, warm-up": TopK(0.01, warmup_epochs=4, steps_per_epoch=100),
    "topk:0.01, momentum correction": TopK(0.01, momentum_correction=0.9),
    "topk:0.01, rows in int8": {"*embeddings*": "int8", "*": "topk:0.01"},
    # Rows have no residual, and without one TopK compresses them, too.
    "topk:0.01, rows as well": {
        "*embeddings*": TopK(0.01, error_feedback=False),
        "*": "topk:0.01",
    },
    "powersgd:4, warm-up": PowerSGD(4, start_step=400),
    "diloco:32, int8": "int8",
    "diloco:32, outer momentum 0.5, int8": "int8",
}
UPDATES = {
    "accumulate:4": Accumulate(4),
    "local_sgd:8": LocalSGD(8),
    "diloco:32": DiLoCo(32),
    "diloco:32, int8": DiLoCo(32),
    # About a hundred rounds are too few for the paper's momentum of 0.9.
    "diloco:32, outer momentum 0.5, int8": DiLoCo(
        32, outer_optimizer=lambda: keras.optimizers.SGD(0.7, momentum=0.5, nesterov=True)
    ),
}
# Arguments of `PipelineStrategy`, whose stages are the two devices.
PIPELINES = {
    "pipedream": {"schedule": "pipedream"},
    "pipeline, int8": {"activation_compression": "int8"},
}
COMPRESSIONS |= {name: None for name in [*UPDATES, *PIPELINES] if name not in COMPRESSIONS}


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task and its length.

    Attributes:
        load: Function from a seed to `(x_train, y_train), (x_test, y_test)`.
        build: Function without arguments that makes the model.
        optimizer: Function from a learning rate to an optimizer.
        learning_rate: Of the first step.
        batch_size: Of both replicas together.
        epochs: How often the data are seen.
    """

    load: Callable
    build: Callable
    optimizer: Callable
    learning_rate: float
    batch_size: int
    epochs: int


def _load_characters(seed):
    train, test, _ = characters.load_data()
    # Less text is learnt to the end sooner.
    train = train[::2]
    return (train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:])


_DIGITS = Task(
    # A larger test set than the example's: one of its 360 images would be 0.3 points.
    load=lambda seed: digits.load_data(seed, test_size=600),
    build=lambda: digits.build_model(),
    optimizer=keras.optimizers.SGD,
    learning_rate=0.1,
    batch_size=32,
    epochs=20,
)
_CHARACTERS = Task(
    load=_load_characters,
    build=lambda: characters.build_model(len(characters.load_data()[2]), channels=48),
    optimizer=lambda rate: keras.optimizers.Adam(rate, beta_1=0.0),
    learning_rate=6e-3,
    batch_size=8,
    epochs=8,
)
TASKS = {
    "digits": _DIGITS,
    "digits_momentum": dataclasses.replace(
        _DIGITS,
        optimizer=lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
        learning_rate=0.01,
    ),
    "characters": _CHARACTERS,
    "characters_adam": dataclasses.replace(_CHARACTERS, optimizer=keras.optimizers.Adam),
    "ngrams": Task(
        load=lambda seed: ngram_embedding.load_data(seed=seed),
        build=lambda: ngram_embedding.build_model(),
        optimizer=keras.optimizers.SGD,
        learning_rate=2.0,
        batch_size=512,
        epochs=2,
    ),
}


def train(task, name, compression, seed):
    """Trains, and returns the results on the test data and what was sent."""
    keras.utils.set_random_seed(seed)
    (x, y), test = task.load(seed)
    steps = len(x) // task.batch_size
    # Batches of one size: what is left over would cost a second graph.
    x, y = x[: steps * task.batch_size], y[: steps * task.batch_size]
    schedule = keras.optimizers.schedules.CosineDecay(task.learning_rate, steps * task.epochs)
    optimizer = task.optimizer
    if "momentum correction" in name:
        # The compressor has the momentum, then, and the optimizer none.
        optimizer = keras.optimizers.SGD
    updates = UPDATES.get(name)
    if name in PIPELINES:
        strategy = keras_psplus.PipelineStrategy(microbatches=4, **PIPELINES[name])
    else:
        strategy = keras_psplus.MultiWorkerMirroredStrategy(
            compression=compression, updates=updates
        )
    if name not in PIPELINES and strategy.num_replicas_in_sync != REPLICAS:
        raise RuntimeError(
            f"{REPLICAS} replicas are needed. Received: {strategy.num_replicas_in_sync}"
        )
    with strategy.scope():
        model = task.build()
        model.compile(
            optimizer=optimizer(schedule),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=max(1, steps // 4),
        )
    begin = time.perf_counter()
    if updates is None:
        history = model.fit(x, y, batch_size=task.batch_size, epochs=task.epochs, verbose=0)
    else:
        # The end of an epoch would be one of a round, too.
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed)
        data = data.repeat().batch(task.batch_size, drop_remainder=True)
        history = model.fit(data, steps_per_epoch=steps * task.epochs, verbose=0)
    seconds = time.perf_counter() - begin
    reached = model.evaluate(*test, batch_size=200, verbose=0, return_dict=True)
    return {
        "accuracy": reached["accuracy"],
        "perplexity": math.exp(reached["loss"]),
        "losses": [round(loss, 4) for loss in history.history["loss"]],
        "ratio": strategy.communication.ratio,
        "sent": strategy.communication.compressed_bytes,
        "steps": steps * task.epochs,
        "seconds": round(seconds, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--compression", default="none", help="as in `COMPRESSIONS` or `get`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="instead of the task's own")
    args = parser.parse_args()
    # One core for each run; but with a single thread for operations, one that waits for the other
    # replica would hold it up.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * REPLICAS)
    logical_devices(REPLICAS)
    task = TASKS[args.task]
    if args.epochs:
        task = dataclasses.replace(task, epochs=args.epochs)
    compression = COMPRESSIONS.get(args.compression, args.compression)
    result = train(task, args.compression, compression, args.seed)
    print("result: " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
