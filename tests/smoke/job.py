"""Trains a small model by a strategy, or in one process.

job.py FOLDER STRATEGY
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

# The last batch has one row: one of two workers has none.
ROWS, BATCH, TABLE = 25, 8, 40
STRATEGIES = {
    "one_process": tf.distribute.get_strategy,
    "all_reduce": psp.MultiWorkerMirroredStrategy,
    "async_parameter_server": psp.ParameterServerStrategy,
    "sync_parameter_server": lambda: psp.ParameterServerStrategy(mode="sync"),
    "pipeline": lambda: psp.PipelineStrategy(microbatches=3),
    "hybrid": lambda: psp.HybridStrategy(placement="parameter_server"),
}


def check_that_models_outside_of_the_scope_are_refused():
    """From when the strategy is made, not from its first model."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="forgotten")
    try:
        model.compile("sgd", "mse")
    except ValueError as error:
        assert "The model 'forgotten' was built outside the strategy's scope" in str(error)
    else:
        raise AssertionError("not refused")


def main(folder, name):
    strategy = STRATEGIES[name]()
    task = getattr(strategy, "task", None)
    if task:
        check_that_models_outside_of_the_scope_are_refused()
    keras.utils.set_random_seed(3)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                layers.Embedding(TABLE, 3),
                layers.Flatten(),
                layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
                layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(1.0)),
            ]
        )
        # Its accumulators change with a row's own gradients only, as slots on servers do.
        optimizer = keras.optimizers.Adagrad(0.1)
        model.compile(optimizer, "mse", metrics=["mae"])
    random = np.random.default_rng(0)
    # Parameter servers draw the first rows of tables by themselves.
    model.set_weights([random.normal(size=w.shape, scale=0.3) for w in model.weights])
    # Servers sum the gradients of a row that a batch looks up twice; others square each.
    batches = [random.permutation(TABLE)[: 4 * BATCH] for _ in range(-(-ROWS // BATCH))]
    x = np.concatenate(batches).reshape(-1, 4)[:ROWS].astype("int32")
    y = random.normal(size=(ROWS, 1)).astype("float32")
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)
    ).history
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    model.save(pathlib.Path(folder, f"{name}.keras"))
    weights = {f"weight_{i}": weight for i, weight in enumerate(model.get_weights())}
    history = {name: np.array(values) for name, values in history.items()}
    process = task.name if task else "process"
    np.savez(
        pathlib.Path(folder, f"{name}-{process}.npz"), predicted=predicted, **weights, **history
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
