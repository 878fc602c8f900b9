"""Damages the states of BackupAndRestore, and looks what a start makes of them."""

import json
import logging
import os
import shutil

import keras

from keras_psplus.log import logger

WEIGHTS, METADATA, MANIFEST = "latest.weights.h5", "training_metadata.json", "manifest.json"


def flip(path):
    """Flips a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def backups(folder):
    """Folders of the backups that count, the newest first."""
    return [folder / name for name in (folder / "LATEST").read_text().split()]


# By a name: the file that an error has to name, and what is done to it.
CASES = {
    "weights missing": (WEIGHTS, lambda path: path.unlink()),
    "weights flipped": (WEIGHTS, flip),
    "metadata flipped": (METADATA, flip),
    "seeds flipped": ("seed_generators.json", flip),
    "manifest missing": (MANIFEST, lambda path: path.unlink()),
    "manifest flipped": (MANIFEST, flip),
    "manifest garbage": (MANIFEST, lambda path: path.write_bytes(b"{\xff")),
    # A reader of one waits for a writer.
    "a FIFO": (WEIGHTS, lambda path: (path.unlink(), os.mkfifo(path))),
}
# Of states that Keras itself has written.
OF_KERAS = {
    "weights cut short": (WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:1000])),
    "Keras's weights a FIFO": (WEIGHTS, lambda path: (path.unlink(), os.mkfifo(path))),
    "metadata missing": (METADATA, lambda path: path.unlink()),
    "metadata garbage": (METADATA, lambda path: path.write_text("{garbage")),
    "no object": (METADATA, lambda path: path.write_text("[1]")),
    "nested": (METADATA, lambda path: path.write_text("[" * 100000)),
    "epoch below 0": (METADATA, lambda path: path.write_text('{"epoch": -5}')),
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
            damage(backups(folder)[0] / file)
            look(kind, name, **options)
        # What was used has come to be the last one.
        look("after", name)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4000, use_bias=False)])
    plain.set_weights([keras.ops.full((1, 4000), 3.0)])
    plain.compile("sgd", "mse")
    callback = keras.callbacks.BackupAndRestore(folder)
    callback.set_model(plain)
    shutil.rmtree(folder)
    for name, (file, damage) in {**OF_KERAS, "whole": (WEIGHTS, lambda path: None)}.items():
        callback.on_epoch_end(2)
        assert not (folder / "LATEST").exists()
        damage(folder / file)
        look("of Keras" if name == "whole" else "damaged", name)
        (folder / file).unlink(missing_ok=True)
