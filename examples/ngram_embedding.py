"""Token prediction for Python programs, with a large and sparsely read embedding table.

    python examples/ngram_embedding.py
    keras-psplus run --workers 2 examples/ngram_embedding.py
    keras-psplus run --workers 2 --chief=false --ps 2 --strategy hybrid examples/ngram_embedding.py

After two epochs 33 to 37 % of the tokens are guessed, by the seed and the same with all three; the
commonest is 16 % of them. With the third the table lies on two parameter servers.

The data are the modules of Python's own standard library, which lie on every machine that runs this
(and differ a little from one version to the next). An example is the eight tokens before a place,
as 26 ids of rows in a table of 200,000: one for each stretch of one to four of them (what it is,
and where), hashed. What is to be guessed is the token at that place, one of the 999 commonest or
"another". Gradients of the table are rows: `tf.IndexedSlices`. `psp.strategy_from_env()` is the
strategy that the launcher was given.
"""

import argparse
import collections
import pathlib
import re
import sysconfig
import zlib

import keras
import numpy as np

import keras_psplus as psp

CONTEXT = 8
TABLE_ROWS = 200_000
CLASSES = 1_000
OTHER = 0

# Words and numbers, line ends with the indentation that follows, and operators.
TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\n[ \t]*|\"{3}|'{3}|[=!<>]=|->|\*\*|//|[^\s\w]")


def load_data(train_size=200_000, test_size=20_000, seed=0):
    """Returns (x_train, y_train), (x_test, y_test); every tenth module is for testing.

    x is int32 of shape `(examples, 26)`, y int32 of shape `(examples,)`.
    """
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    modules = [TOKEN.findall(file.read_text("utf-8", errors="replace")) for file in files]
    train = [tokens for i, tokens in enumerate(modules) if i % 10]
    test = modules[::10]
    counts = collections.Counter(token for tokens in train for token in tokens)
    classes = {token: i + 1 for i, (token, _) in enumerate(counts.most_common(CLASSES - 1))}
    rng = np.random.default_rng(seed)
    return _examples(train, classes, train_size, rng), _examples(test, classes, test_size, rng)


def _examples(modules, classes, size, rng):
    x, y = [], []
    for tokens in modules:
        if len(tokens) > CONTEXT:
            x.append(hashed_ngrams(tokens))
            y.append([classes.get(token, OTHER) for token in tokens[CONTEXT:]])
    x, y = np.concatenate(x), np.concatenate(y).astype("int32")
    chosen = rng.permutation(len(x))[:size]
    return x[chosen], y[chosen]


def hashed_ngrams(tokens):
    """Ids of the 1- to 4-grams among the eight tokens before each token.

    The first eight tokens have none.
    """
    codes = np.array([zlib.crc32(token.encode()) for token in tokens], "uint64")
    count = len(tokens) - CONTEXT
    columns = []
    for length in (1, 2, 3, 4):
        for start in range(CONTEXT - length + 1):
            # FNV-1a over the tokens' codes; it begins with the column's number, so that one n-gram
            # is something else at another place. Products wrap around, as they should.
            hashed = np.full(count, 0xCBF29CE484222325 + len(columns), "uint64")
            for place in range(start, start + length):
                hashed = (hashed ^ codes[place : place + count]) * np.uint64(0x100000001B3)
            columns.append((hashed >> np.uint64(20)) % np.uint64(TABLE_ROWS))
    return np.stack(columns, 1).astype("int32")


def build_model(width=16, hidden=64):
    """Model of a table of 3.2 million weights and two small layers.

    An example sums up 26 rows of the table.
    """
    ids = keras.Input((26,), dtype="int32")
    rows = keras.layers.Embedding(TABLE_ROWS, width)(ids)
    x = keras.layers.Dense(hidden, activation="relu")(keras.ops.sum(rows, axis=1))
    return keras.Model(ids, keras.layers.Dense(CLASSES)(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=512, help="of all workers together")
    parser.add_argument("--train_size", type=int, default=200_000, help="number of examples")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    (x_train, y_train), (x_test, y_test) = load_data(args.train_size)

    strategy = psp.strategy_from_env()
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(2.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            # XLA, Keras's choice for one process, would make the table's gradient dense.
            jit_compile=False,
        )

    is_chief = getattr(strategy, "is_chief", True)
    model.fit(
        x_train,
        y_train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2 if is_chief else 0,
    )
    logs = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)
    if is_chief:
        # For programs that read this output, such as the tests.
        accuracy, workers = logs["accuracy"], getattr(strategy, "num_workers", 1)
        print(f"ngram_embedding: accuracy={accuracy:.4f} workers={workers}", flush=True)


if __name__ == "__main__":
    main()
