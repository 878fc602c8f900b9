"""Data: the iterator over epochs, and how many steps an epoch has."""

from keras_psplus.core.data import epochs
from keras_psplus.keras_hooks.hook import Hook, engine_of, of_holder
from keras_psplus.keras_internals.keras_parts import epoch_iterator, tf_trainer

HOOKS = (
    Hook(
        tf_trainer.TFEpochIterator,
        "__init__",
        ["self", "distribute_strategy"],
        engine_of,
        "data",
        "each process reads its part of the global batches, or steps take them with them",
        call="make_iterator",
        by=1,
    ),
    Hook(
        tf_trainer.TFEpochIterator,
        "tf_sync",
        ["self"],
        of_holder,
        "data",
        "steps that were sent to workers are waited for",
        call="drain",
    ),
    Hook(
        epoch_iterator.EpochIterator,
        "__iter__",
        ["self"],
        of_holder,
        epochs.begin,
        "training goes on after the batch of a backup",
    ),
    Hook(
        epoch_iterator.EpochIterator,
        "_enumerate_iterator",
        ["self"],
        of_holder,
        epochs.enumerate_steps,
        "an epoch has as many steps as its data, not as the first epoch's",
    ),
    Hook(
        epoch_iterator.EpochIterator,
        "_interrupted_warning",
        ["self"],
        of_holder,
        epochs.warn_of_early_end,
        "data of unknown length end like that, without a warning",
    ),
)
