"""Training with a dynamic table on parameter servers equals training in one process."""

import tempfile
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.hybrid.tables.dynamic import _ServerPart
from keras_psplus.tables import policies
from keras_psplus.tables.admission import counters_of_block
from keras_psplus.tables.keys import BLOCKS
from tests.hybrid import dynamic_cases as cases
from tests.hybrid.models import is_alone
from tests.support.cluster import equals_one_process, reference, run
from tests.support.tiers import extended


def read_again(name, folder):
    """Trains a case, whose files are read again: those of the model, and those of servers."""
    model, table, results = cases.train_and_evaluate(name)
    results |= cases.contents(model, table)
    with tempfile.TemporaryDirectory() as own:
        cases.check_reads_weights(name, model, table, own)
    if name == "counted" and not is_alone():
        check_files_of_servers(name, model, table, f"{folder}/tables")
    return results | cases.moved(name, model, table)


def check_files_of_servers(name, model, table, folder):
    before, strategy = cases.contents(model, table), tf.distribute.get_strategy()
    strategy.save_tables(folder)
    cases.train_more(model, name, *cases.data())
    strategy.load_tables(folder)
    after = cases.contents(model, table)
    # Dense weights go on; slot 2 is the table's.
    for what in [what for what in after if what.startswith("table") or what == "slot_2"]:
        np.testing.assert_array_equal(after[what], before[what], err_msg=what)


def resumed(name, folder):
    """Trains a case, in a cluster half of it from a backup."""
    model, table, results = (
        cases.train_alone(name) if is_alone() else cases.broken_off(name, folder)
    )
    return results | cases.contents(model, table)


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("layout", ["hybrid22", "hybrid21_all"])
@pytest.mark.parametrize("name", ["counted", "bounded"])
def test_equals_one_process(layout, name):
    found = equals_one_process(layout, cases.train_briefly, 1e-4, cases.ALONE, name=name)
    assert len(found.first["table_keys"])


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout, case, name",
    extended(
        ("hybrid22", read_again, "counted"),
        ("hybrid22", resumed, "filtered"),
        ("hybrid21_all", read_again, "counted"),
        ("hybrid21_all", resumed, "filtered"),
    ),
)
def test_files_and_backups_equal_one_process(layout, case, name, tmp_path):
    args = {"name": name, "folder": str(tmp_path)}
    found = equals_one_process(layout, case, 1e-4, cases.ALONE, **args)
    assert len(found.first["table_keys"])


class AsksForMethods(keras.callbacks.Callback):
    """Has servers begin anew after each step, as for methods of which one is called first."""

    _steps = 0

    def on_train_batch_end(self, batch, logs=None):
        table = next(v for v in self.model.variables if "table" in v.path)._value.table
        if tf.distribute.get_strategy().task.is_chief:
            self._steps += 1
            table.servers.serve(table.key, f"of step {self._steps}")


def halves(folder=None):
    return cases.halves(folder, callbacks=[] if folder else [AsksForMethods()])


@pytest.mark.processes
@pytest.mark.parametrize("has_files", [False, *extended(True)])
def test_rows_in_16_bits_are_the_bits_of_one_process(has_files, tmp_path):
    found = run("hybrid22", halves, folder=str(tmp_path) if has_files else None).first
    cases.check_halves(found, reference(cases.halves, cases.ALONE))


@pytest.mark.extended
@pytest.mark.processes
def test_rows_in_16_bits_train_asynchronously():
    found = run("hybrid21_async", halves, same=False).first
    exact = reference(cases.halves, cases.ALONE)
    np.testing.assert_array_equal(found["table_keys"], exact["table_keys"])
    rows = found["table_rows"]
    assert not (rows.view(np.uint32) & 0xFFFF).any() and rows.mean() > 0.1


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize(
    "layout, is_text", [("hybrid22", False), ("hybrid22", True), ("hybrid21_async", False)]
)
def test_padding_has_no_row_on_servers(layout, is_text):
    if layout == "hybrid22":
        found = equals_one_process(
            layout, cases.train_sequences, 1e-4, cases.ALONE, is_text=is_text
        )
    else:
        found = run(layout, cases.train_sequences, same=False)
    keys, x, _ = cases.sequences()
    if not is_text:
        assert found.first["table_keys"].tolist() == sorted(keys[np.unique(x[x > 0])].tolist())


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
