"""A `fit` that is resumed: its place in the data, and what its callbacks had counted."""

import types

import keras
import numpy as np
import pytest

from keras_psplus.core.backup import training_state
from keras_psplus.core.backup.fit_progress import FitProgress


class Iterator:
    pass


@pytest.mark.parametrize("first_epoch", [0, 3])
def test_only_epochs_of_the_same_fit_come_before_in_its_data(first_epoch):
    facts = {"epoch": 5, "batch": 0, "first_epoch": first_epoch, "data": "seed", "layout": None}
    progress, iterator = FitProgress(), Iterator()
    progress.resume(types.SimpleNamespace(facts=facts))
    progress.begin_epoch(types.SimpleNamespace(), 5)
    assert progress.begin_iteration(iterator) == (5 - first_epoch, 0, "seed")
    # Those of the next epoch follow by themselves.
    progress.begin_epoch(types.SimpleNamespace(), 6)
    assert progress.begin_iteration(iterator) is None


def test_the_data_of_a_resumed_fit_are_in_the_order_that_its_backup_tells(monkeypatch, tmp_path):
    monkeypatch.setattr(FitProgress, "_seed_of", lambda *_: 7)
    backup, model = keras.callbacks.BackupAndRestore(tmp_path), keras.Sequential()
    model.compile("sgd", "mse")
    for is_chief, expected in ((True, 7), (False, 3)):
        progress = FitProgress()
        progress.begin(keras.Model.fit, model, (), {"callbacks": [backup]}, is_chief)
        # Those of a validation are the next to be read.
        assert [progress.data_seed(drawn) for drawn in (3, 4)] == [expected, 4]


@pytest.mark.parametrize("kind", ["EarlyStopping", "ReduceLROnPlateau"])
def test_patience_goes_on(kind):
    optimizer = types.SimpleNamespace(learning_rate=np.float32(0.1))

    def begun():
        callback = getattr(keras.callbacks, kind)("loss", patience=4, mode="min")
        callback.set_model(types.SimpleNamespace(optimizer=optimizer))
        callback.on_train_begin()
        return callback

    def counted(callback, losses):
        for epoch, loss in losses:
            callback.on_epoch_end(epoch, {"loss": loss})
        return {n: v for n, v in vars(callback).items() if isinstance(v, (int, float))}

    losses, resumed = list(enumerate([3.0, 2.0, 2.5, 2.5])), begun()
    before = begun()
    counted(before, losses[:3])
    states, _ = training_state.states_of([before])
    training_state.restore([resumed], states, {})
    assert counted(resumed, losses[3:]) == counted(begun(), losses)
