"""Damages the states of BackupAndRestore, and looks what a start makes of them."""

import json
import logging
import os
import shutil

import keras

from keras_psplus.log import logger

WEIGHTS, METADATA, DIGESTS = "latest.weights.h5", "training_metadata.json", "digests.json"


def flip(path):
    """Flips a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _without_digests(path, text=None):
    (path.parent / DIGESTS).unlink()
    if text is not None:
        path.write_text(text)


def _cut_short(path):
    _without_digests(path)
    path.write_bytes(path.read_bytes()[:1000])


# By a name: the file that an error has to name, and what is done to it.
CASES = {
    "weights missing": (WEIGHTS, lambda path: path.unlink()),
    "metadata missing": (METADATA, lambda path: path.unlink()),
    "digests missing, too": (METADATA, lambda path: (_without_digests(path), path.unlink())),
    "weights flipped": (WEIGHTS, flip),
    "metadata flipped": (METADATA, flip),
    "seeds flipped": ("seed_generators.json", flip),
    "digests flipped": (DIGESTS, flip),
    "digests garbage": (DIGESTS, lambda path: path.write_bytes(b"{\xff")),
    # A reader of one waits for a writer.
    "a FIFO": (WEIGHTS, lambda path: (path.unlink(), os.mkfifo(path))),
    "a FIFO without digests": (
        METADATA,
        lambda path: (_without_digests(path), path.unlink(), os.mkfifo(path)),
    ),
    "weights cut short": (WEIGHTS, _cut_short),
    "metadata garbage": (METADATA, lambda path: _without_digests(path, "{garbage")),
    "no object": (METADATA, lambda path: _without_digests(path, "[1]")),
    "nested": (METADATA, lambda path: _without_digests(path, "[" * 100000)),
    "epoch below 0": (METADATA, lambda path: _without_digests(path, '{"epoch": -5}')),
    "epoch no one comes to": (
        METADATA,
        lambda path: _without_digests(path, '{"epoch": 1000000000}'),
    ),
}


def print_cases(folder, save, found):
    """Prints a line of JSON for each case: its name, what a start says, and the state that it has.

    Args:
        folder: BackupAndRestore's folder.
        save: Function of an epoch and options that saves a state.
        found: Function of options that returns the state that a start finds.
    """
    lines = []
    logger.addHandler(logging.StreamHandler(type("Lines", (), {"write": lines.append})))

    def look(kind, name, **options):
        lines.clear()
        try:
            state = found(**options)
        except OSError as error:
            lines.append(f"{error}")
            state = None
        print(json.dumps([kind, name, ["".join(lines), state]]), flush=True)

    def prepare(**options):
        shutil.rmtree(folder, ignore_errors=True)
        for epoch in (1, 2):
            save(epoch, **options)

    for name, (file, damage) in CASES.items():
        for kind, options in (("damaged", {}), ("replaced", {"double_checkpoint": True})):
            prepare(**options)
            damage(folder / file)
            look(kind, name, **options)
        # What was used has come to be the last one.
        look("after", name)
    prepare()
    (folder / DIGESTS).unlink()
    look("without digests", "digests deleted", double_checkpoint=True)
    shutil.rmtree(folder)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4000, use_bias=False)])
    plain.set_weights([keras.ops.full((1, 4000), 3.0)])
    plain.compile("sgd", "mse")
    callback = keras.callbacks.BackupAndRestore(folder)
    callback.set_model(plain)
    callback.on_epoch_end(2)
    assert not (folder / DIGESTS).exists()
    look("without digests", "Keras")
