"""Learns to write like Python's reference manual, one character at a time.

    python examples/characters.py
    keras-psplus run --workers 2 examples/characters.py

The text is the manual that `help("for")` shows, which every Python brings along
(`pydoc_data.topics`): 465,000 characters in about 80 topics, which differ a little from one version
of Python to the next. The model predicts each character from the ones before it.
`psp.strategy_from_env()` is the strategy that the launcher was given.
"""

import argparse
import math
from pydoc_data import topics

import keras
import numpy as np

import keras_psplus as psp

WINDOW = 64


def load_data(window=WINDOW):
    """Returns the windows of the training text, those of the test text, and the alphabet.

    Every tenth topic is for testing. Windows are int32 of shape `(windows, window + 1)`, and follow
    each other without a gap: the last character of one is the first of the next.
    """
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    alphabet = sorted(set("".join(texts)))
    codes = {character: code for code, character in enumerate(alphabet)}
    parts = []
    for chosen in (lambda i: i % 10 != 0, lambda i: i % 10 == 0):
        text = "\n".join(text for i, text in enumerate(texts) if chosen(i))
        encoded = np.array([codes[character] for character in text], "int32")
        starts = np.arange(0, len(encoded) - window, window)
        parts.append(encoded[starts[:, np.newaxis] + np.arange(window + 1)])
    return *parts, alphabet


def build_model(alphabet_size, channels=64):
    """Causal convolutions over the last 15 characters, as wide as a hidden layer each."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(alphabet_size, 32),
            layers.Conv1D(channels, 8, padding="causal", activation="relu"),
            layers.Conv1D(channels, 8, padding="causal", activation="relu"),
            layers.Dense(alphabet_size),
        ]
    )


def perplexity(model, windows):
    """Among how many characters, all alike, the model would hesitate as much."""
    loss = model.evaluate(windows[:, :-1], windows[:, 1:], verbose=0, return_dict=True)["loss"]
    return math.exp(loss)


def sample(model, alphabet, length, seed, prompt="The "):
    """Lets the model write, each character drawn at random from what it predicts."""
    rng = np.random.default_rng(seed)
    written = [alphabet.index(character) for character in prompt]
    for _ in range(length):
        context = np.zeros([1, WINDOW], "int32")
        known = written[-WINDOW:]
        context[0, : len(known)] = known
        logits = keras.ops.convert_to_numpy(model(context))[0, len(known) - 1].astype("float64")
        probabilities = np.exp(logits - logits.max())
        written.append(rng.choice(len(alphabet), p=probabilities / probabilities.sum()))
    return "".join(alphabet[code] for code in written)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16, help="of all workers together")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    train, test, alphabet = load_data()

    strategy = psp.strategy_from_env()
    with strategy.scope():
        model = build_model(len(alphabet))
        model.compile(
            optimizer=keras.optimizers.Adam(5e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    is_chief = getattr(strategy, "is_chief", True)
    model.fit(
        train[:, :-1],
        train[:, 1:],
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2 if is_chief else 0,
    )
    reached = perplexity(model, test)
    if is_chief:
        # For programs that read this output, such as the tests.
        print(
            f"characters: perplexity={reached:.4f} workers={getattr(strategy, 'num_workers', 1)}",
            flush=True,
        )
        print(sample(model, alphabet, 200, args.seed))


if __name__ == "__main__":
    main()
