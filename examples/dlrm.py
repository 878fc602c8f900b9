"""DLRM with KerasRS, on large tables of which a step reads few rows.

The model predicts which advertisements are clicked.

    pip install ".[examples]"  # in a checkout of the library
    python examples/dlrm.py
    keras-psplus run --workers 2 --chief=false --ps 2 --strategy hybrid examples/dlrm.py

The model is that of Naumov et al., 2019 (https://arxiv.org/abs/1906.00091), as in Keras's example
"Ranking with Deep Learning Recommendation Model": a perceptron for what is a number, a table for
each thing that has an id, dot products between all of these, and a perceptron on top. Under
`HybridStrategy` the two large tables lie on the parameter servers, and rows of them travel.

Clicks are drawn at random: each id has a hidden number, by which it is clicked more or less often,
and a hidden vector; the more the vectors of an example agree, the likelier is a click. Some ids are
much more frequent than others, as in the log of Criteo that the paper uses.
"""

import argparse
import json
import time

import keras
import keras_rs
import numpy as np

import keras_psplus as psp

NUMBERS = 13
# Of each table, the number of rows. As 16 float32 numbers, the first two have over a megabyte.
TABLES = {"advertisement": 100_000, "site": 20_000, "device": 500, "country": 100, "weekday": 7}
DIM = 16


def load_data(train_size=100_000, test_size=10_000, seed=0):
    """Returns (x, y) to train and to test with.

    x is a dict from features to arrays.
    """
    rng = np.random.default_rng(seed)
    size = train_size + test_size
    x = {"numbers": rng.standard_normal((size, NUMBERS), "float32")}
    hidden = [x["numbers"] @ rng.normal(0, NUMBERS**-0.5, (NUMBERS, 4))]
    for name, rows in TABLES.items():
        chances = 1 / np.arange(1, rows + 1)  # Zipf's law
        x[name] = rng.choice(rows, size, p=chances / chances.sum()).astype("int32")
        hidden.append(rng.standard_normal((rows, 4))[x[name]])
    hidden = np.stack(hidden)
    agreement = (hidden.sum(0) ** 2 - (hidden**2).sum(0)).sum(-1) / 2  # of all pairs
    chances = 1 / (1 + np.exp(-hidden.sum(0)[:, 0] - 0.3 * agreement))
    y = (rng.random(size) < chances).astype("float32")
    return [
        ({name: values[rows] for name, values in x.items()}, y[rows])
        for rows in (slice(train_size), slice(train_size, size))
    ]


def perceptron(x, *widths):
    for width in widths:
        x = keras.layers.Dense(width, activation="relu")(x)
    return x


def build_model():
    inputs = {"numbers": keras.Input((NUMBERS,), name="numbers")}
    inputs |= {name: keras.Input((), dtype="int32", name=name) for name in TABLES}
    features = {}
    for seed, (name, rows) in enumerate(TABLES.items()):
        # KerasRS makes its tables in any order: each has a seed of its own.
        first = keras.initializers.RandomUniform(-0.05, 0.05, seed=seed)
        table = keras_rs.layers.TableConfig(name, rows, DIM, first, placement="auto")
        features[name] = keras_rs.layers.FeatureConfig(name, table, (None,), (None, DIM))
    embedded = keras_rs.layers.DistributedEmbedding(features)({n: inputs[n] for n in TABLES})
    bottom = perceptron(inputs["numbers"], 64, DIM)
    products = keras_rs.layers.DotInteraction()([bottom, *(embedded[name] for name in TABLES)])
    top = perceptron(keras.layers.Concatenate()([bottom, products]), 64, 32)
    return keras.Model(inputs, keras.layers.Dense(1)(top))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=256, help="of all workers together")
    parser.add_argument("--train_size", type=int, default=100_000, help="number of examples")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    (x_train, y_train), (x_test, y_test) = load_data(args.train_size)

    strategy = psp.strategy_from_env()
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(1.0),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
            # XLA, Keras's choice for one process, would make the tables' gradients dense.
            jit_compile=False,
        )

    is_chief = getattr(strategy, "is_chief", True)
    begin = time.perf_counter()
    history = model.fit(
        x_train,
        y_train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        shuffle=False,  # They are in random order, which is thus the same in all clusters.
        verbose=2 if is_chief else 0,
    ).history
    seconds = time.perf_counter() - begin
    score = model.evaluate(x_test, y_test, batch_size=1000, verbose=0, return_dict=True)
    if is_chief:
        print(f"Area under the curve, of other examples: {score['auc']:.4f}")
        # For programs that read this output, such as the tests.
        result = {"test": score, "seconds": round(seconds, 2), **history}
        print("dlrm:", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
