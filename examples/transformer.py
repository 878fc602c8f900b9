"""A transformer language model, as in Keras's example "Text generation with a miniature GPT".

    python examples/transformer.py
    keras-psplus run --workers 2 examples/transformer.py
    keras-psplus run --workers 2 --strategy fsdp examples/transformer.py
    keras-psplus run --workers 2 examples/transformer.py --model_parallel 2
    keras-psplus run --workers 2 --strategy pipeline examples/transformer.py

It learns to continue the text of `characters.py`, Python's reference manual, one character at a
time, and writes some of its own in the end. The example of Keras, of which it is a smaller one with
several blocks, is https://keras.io/examples/generative/text_generation_with_miniature_gpt/.

Under `fsdp`, each worker keeps a share of every weight, and layers gather theirs to compute. With
`--model_parallel`, each has some of the heads and of the hidden units of every block. In a
pipeline, each worker has some of the blocks, and activations go from worker to worker. The results
are those of one process. `psp.strategy_from_env()` is the strategy that the launcher was given.
"""

import argparse
import math
import time

import keras
import numpy as np
from characters import WINDOW, load_data

import keras_psplus as psp

layers = keras.layers
# The axis of the mesh along which each weight is cut; what is not named is on every worker.
LAYOUTS = {
    r"embedding/embeddings": ("model", None),
    r"attention_\d+/(query|key|value)/kernel": (None, "model", None),
    r"attention_\d+/(query|key|value)/bias": ("model", None),
    r"attention_\d+/attention_output/kernel": ("model", None, None),
    r"up_\d+/kernel": (None, "model"),
    r"up_\d+/bias": ("model",),
    r"down_\d+/kernel": ("model", None),
}


class Positions(layers.Layer):
    """Adds a vector for each position."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=(WINDOW, shape[-1]), name="vectors")

    def call(self, x):
        return x + self.vectors


def block(x, channels, heads, number):
    """Transformer block: causal self-attention, then a hidden layer for each position."""
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(heads, channels // heads, name=f"attention_{number}")
    x = x + attention(normal, normal, use_causal_mask=True)
    up = layers.Dense(4 * channels, activation="gelu", name=f"up_{number}")
    hidden = up(layers.LayerNormalization()(x))
    return x + layers.Dense(channels, name=f"down_{number}")(hidden)


def build_model(alphabet_size, blocks, channels=64, heads=4):
    inputs = keras.Input((WINDOW,), dtype="int32")
    # One that the workers of a mesh can divide.
    rows = alphabet_size + alphabet_size % 2
    x = Positions()(layers.Embedding(rows, channels, name="embedding")(inputs))
    for number in range(blocks):
        x = block(x, channels, heads, number)
    return keras.Model(inputs, layers.Dense(alphabet_size)(layers.LayerNormalization()(x)))


def write(model, alphabet, length, seed, prompt="The ", choices=10):
    """Lets the model continue a text, each character drawn among the likeliest of them.

    All workers call this, as they do `fit`: `predict` is done by all of them together.
    """
    rng = np.random.default_rng(seed)
    written = [alphabet.index(character) for character in prompt]
    for _ in range(length):
        known = written[-WINDOW:]
        window = np.zeros([1, WINDOW], "int32")
        window[0, : len(known)] = known
        logits = model.predict(window, verbose=0)[0, len(known) - 1].astype("float64")
        likely = np.argsort(logits)[-choices:]
        chances = np.exp(logits[likely] - logits.max())
        written.append(int(rng.choice(likely, p=chances / chances.sum())))
    return "".join(alphabet[code] for code in written)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32, help="of all workers together")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--train_size", type=int, help="windows to train on; by default, all")
    parser.add_argument("--write", type=int, default=100, help="characters to write in the end")
    parser.add_argument("--model_parallel", type=int, help="workers that share each layer: all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    train, test, alphabet = load_data()
    train = np.random.default_rng(args.seed).permutation(train)[: args.train_size]

    if args.model_parallel:
        mesh = psp.DeviceMesh((args.model_parallel,), ("model",))
        strategy = psp.ModelParallelStrategy(layout_map=LAYOUTS, mesh=mesh)
    else:
        strategy = psp.strategy_from_env()
    with strategy.scope():
        model = build_model(len(alphabet), args.blocks)
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    is_chief = getattr(strategy, "is_chief", True)
    begin = time.perf_counter()
    history = model.fit(
        train[:, :-1],
        train[:, 1:],
        batch_size=args.batch_size,
        epochs=args.epochs,
        shuffle=False,
        verbose=2 if is_chief else 0,
    ).history
    seconds = time.perf_counter() - begin
    reached = model.evaluate(test[:, :-1], test[:, 1:], verbose=0, return_dict=True)["loss"]
    text = write(model, alphabet, args.write, args.seed) if args.write else ""
    if is_chief:
        print(text)
        if hasattr(strategy, "communication"):
            print(strategy.communication.summary())
        # For programs that read this output, such as the tests.
        print(
            f"transformer: loss={history['loss'][-1]:.5f} perplexity={math.exp(reached):.4f} "
            f"stages={getattr(strategy, 'num_stages', 1)} seconds={seconds:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
