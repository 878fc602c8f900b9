"""Text classification with KerasHub: finds the Python package of a docstring.

    pip install ".[examples]"  # in a checkout of the library
    python examples/text_classification.py
    keras-psplus run --workers 2 examples/text_classification.py

KerasHub's DistilBERT (https://keras.io/keras_hub/), small and with random weights, so that nothing
is downloaded; the model takes strings, and `fit` cuts them into tokens. The texts are the
docstrings of Python's own standard library, which differ a little from one version to the next.
"""

import argparse
import ast
import collections
import json
import pathlib
import re
import sysconfig
import time

import keras
import keras_hub
import numpy as np

import keras_psplus as psp

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest", "xml")
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def load_data(test_size=250, seed=0):
    """Returns (texts, labels) to train and to test with; texts are an array of strings."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    found = {}
    for label, package in enumerate(PACKAGES):
        for file in sorted((library / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    text = ast.get_docstring(node) or ""
                    if len(text.split()) >= 5:
                        found[text] = label
    texts, labels = np.array(list(found)), np.array(list(found.values()), "int32")
    order = np.random.default_rng(seed).permutation(len(texts))
    return [(texts[rows], labels[rows]) for rows in (order[test_size:], order[:test_size])]


def build_preprocessor(texts, size=2000, length=64):
    """Cuts texts into the commonest words, and what is no such word into letters."""
    words = collections.Counter(re.findall(r"\w+|[^\w\s]", " ".join(texts).lower()))
    letters = sorted({letter for word in words for letter in word})
    vocabulary = SPECIAL_TOKENS + letters + [f"##{letter}" for letter in letters]
    known = set(vocabulary)
    vocabulary += [word for word, _ in words.most_common(size) if word not in known]
    tokenizer = keras_hub.models.DistilBertTokenizer(vocabulary, lowercase=True)
    return keras_hub.models.DistilBertTextClassifierPreprocessor(tokenizer, sequence_length=length)


def build_model(preprocessor, dropout):
    """A DistilBERT of two layers, each 64 wide."""
    backbone = keras_hub.models.DistilBertBackbone(
        vocabulary_size=preprocessor.tokenizer.vocabulary_size(),
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        dropout=dropout,
        max_sequence_length=preprocessor.sequence_length,
    )
    return keras_hub.models.DistilBertTextClassifier(
        backbone, num_classes=len(PACKAGES), preprocessor=preprocessor, dropout=dropout
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32, help="of all workers together")
    # Each replica draws units of its own; with 0, all strategies give the same result.
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--train_size", type=int, help="texts to train on; by default, all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    (train, labels), (test, test_labels) = load_data()
    train, labels = train[: args.train_size], labels[: args.train_size]

    # Before KerasHub's tokenizer, which runs operations of TensorFlow when it is made.
    strategy = psp.strategy_from_env()
    preprocessor = build_preprocessor(train)
    with strategy.scope():
        model = build_model(preprocessor, args.dropout)
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    is_chief = getattr(strategy, "is_chief", True)
    begin = time.perf_counter()
    history = model.fit(
        train,
        labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        shuffle=False,  # They are in random order, and KerasHub leaves them in it.
        verbose=2 if is_chief else 0,
    ).history
    seconds = time.perf_counter() - begin
    score = model.evaluate(test, test_labels, verbose=0, return_dict=True)
    if is_chief:
        print(f"{score['accuracy']:.1%} of {len(test)} other docstrings are recognised")
        # For programs that read this output, such as the tests.
        result = {"test": score, "seconds": round(seconds, 2), **history}
        print("text_classification:", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
