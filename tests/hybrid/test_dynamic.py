"""Training with a dynamic table on parameter servers equals training in one process."""

import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.files.table_files import read_list, stems_of
from keras_psplus.hybrid.tables.dynamic import _ServerPart
from keras_psplus.tables import policies
from keras_psplus.tables.admission import counters_of_block
from keras_psplus.tables.keys import BLOCKS
from tests.hybrid.dynamic_cases import ALONE, as_ids, contents, data, train, trained
from tests.hybrid.models import is_alone
from tests.support.cluster import equals_one_process
from tests.support.tiers import extended


@pytest.mark.processes
@pytest.mark.parametrize("case", ["counted", *extended("plain", "filtered", "keras_rs")])
def test_equals_one_process(case, tmp_path):
    args = {"name": case, "folder": str(tmp_path)}
    found = equals_one_process("hybrid22", trained, 1e-4, ALONE, **args)
    assert len(found.first["table_keys"])


class BreakOff(keras.callbacks.Callback):
    """Ends training in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.is_second = epoch == 1

    def on_train_batch_end(self, batch, logs=None):
        if self.is_second and batch == 3:
            raise InterruptedError


def resumed(name, folder):
    """Trains until it is broken off, and another model from the backup on.

    The backup is of all rows, and of what has changed since, twice.
    """
    x, y = data()
    last = [[]] if is_alone() else [[BreakOff()], []]
    for callbacks in last:
        with contextlib.suppress(InterruptedError):
            if not is_alone():
                backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=3)
                callbacks.append(backup)
            model, table, results = train(name, as_ids(name, x), y, callbacks=callbacks)
        if callbacks[:-1]:
            assert len(stems_of(read_list(f"{folder}/backup"))) == 3
    return results | contents(model, table)


@pytest.mark.processes
@pytest.mark.parametrize("case", ["counted", *extended("filtered")])
def test_resumed_training_has_the_same_keys_rows_slots_and_counts(case, tmp_path):
    args = {"name": case, "folder": str(tmp_path)}
    equals_one_process("hybrid22", resumed, 1e-4, ALONE, **args)


@pytest.mark.parametrize(
    ("admit", "expected"),
    [
        (None, []),
        (policies.Count(2), ["insert_candidates"]),
        (policies.Bloom(2, 10**5), ["set_filter"]),
        (policies.Bloom(2, 10**6), []),
    ],
)
def test_a_server_takes_the_counts_of_its_own_policy_from_a_file(admit, expected):
    asked = []

    def call(what, *_):
        asked.append(what)
        return tf.zeros([])

    link = types.SimpleNamespace(call=call)
    spec = {"admit": policies.check_admit(admit)}
    table = types.SimpleNamespace(dim=2, spec=spec, servers=[0], method=lambda what: what)
    blocks = np.ones([BLOCKS, counters_of_block({"bits": 10**5})], np.uint8)
    _ServerPart(table, 0, link).set_counters(np.ones([3, 4], np.int64), blocks)
    assert asked == expected
