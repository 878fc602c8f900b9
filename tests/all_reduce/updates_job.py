"""Cases of `updates_cases.py` for scripts of parameter servers and of parts of models."""

import os

import keras

from tests.all_reduce import updates_cases
from tests.all_reduce.job_parts import Interrupt, Interrupted
from tests.all_reduce.updates_cases import (  # noqa: F401
    ACCUMULATED,
    OfParts,
    dense,
    embedding,
    fit,
    number_of_updates,
    problem,
    slices,
    train_accumulated,
    with_dropout,
)


def accumulated(make, out, names):
    for name in names:
        strategy = make(updates_cases.of(("Accumulate", ACCUMULATED[name][1])))
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = train_accumulated(strategy, name)
        numbers = [number_of_updates(model), strategy.communication.logical_bytes]
        out[f"accumulated {name}"] = {"weights": model.get_weights(), "numbers": numbers}


def trained_on_larger_batches(name):
    """The model of a case, trained in this process, and the number of its updates."""
    from tests import references

    keras.utils.set_random_seed(1)
    with references.built_first():
        model, found = updates_cases.on_larger_batches(name)
    return model, found["batches"]


def weights_of(results, name):
    keys = [key for key in results if key.rpartition("/")[0] == name]
    return [results[key] for key in sorted(keys, key=lambda key: int(key.rpartition("/")[2]))]


def resumed(make, out, folder, cases):
    """Interrupted and started again, it ends as if nothing had happened."""
    for name, (policy, compressor, build) in cases.items():

        def train(*callbacks, policy=policy, compressor=compressor, build=build):
            strategy = make(policy, compressor)
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = build()
            fit(model, 4, callbacks)
            sent = strategy.communication
            return {
                "weights": model.get_weights(),
                "numbers": [sent.logical_bytes, sent.compressed_bytes],
            }

        # Each worker has a disk of its own.
        disk = os.path.join(folder, f"{name}-{os.getpid()}")
        try:
            train(keras.callbacks.BackupAndRestore(disk, save_freq=3), Interrupt(1))
        except Interrupted:
            pass
        out[f"resumed {name}"] = train(keras.callbacks.BackupAndRestore(disk, save_freq=3))
        # Workers that step alone average their weights for a backup.
        whole = keras.callbacks.BackupAndRestore(f"{disk}-whole", save_freq=3)
        out[f"whole {name}"] = train(*([whole] if policy.local else []))
