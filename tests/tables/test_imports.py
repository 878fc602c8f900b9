"""Rows of TFRA 0.8.1, NumPy's and Parquet files in a `DynamicEmbedding`."""

import shutil
import sys

import keras
import numpy as np
import pytest

import keras_psplus as psp
from tests.support.cluster import run
from tests.support.results import assert_close
from tests.tables import tfra_cases
from tests.tables.tfra_cases import TFRA

USERS, ITEMS = "user_embedding-parameter", "items_embedding-parameter"
FOLDER = TFRA / "files" / "TFRADynamicEmbedding-1"


def layer(dim=4, optimizer=None):
    table = psp.layers.DynamicEmbedding(dim, combiner="sum", name="t")
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, table(ids))
    model.compile(optimizer or "adam", "mse")
    if optimizer:
        model.optimizer.build(model.trainable_variables)
    return table


def momentum_of(table):
    """Slot of Adam's, in the order of the keys."""
    return np.asarray(table.table._value.optimizer.variables[2])


def test_training_goes_on_as_in_tfra():
    model, tables = tfra_cases.build()
    tfra_cases.move(TFRA / "checkpoint" / "ckpt-1", model, tables)
    # Of 8 steps, how many each item was in, which TFRA has counted twice in each.
    items = tfra_cases.after()["items"]
    steps = [np.unique(items[first : first + 16]) for first in range(0, 64, 16)]
    keys, counts = np.unique(np.concatenate(steps), return_counts=True)
    np.testing.assert_array_equal(tables[1].keys, keys)
    np.testing.assert_array_equal(tables[1].counts()[0], 2 * counts)
    assert set(tables[0].counts()[0]) == {1}
    expected = tfra_cases.after()
    for what, value in tfra_cases.go_on(model).items():
        np.testing.assert_allclose(value, expected[what], atol=5e-6, err_msg=what)


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("layout", ["hybrid22", "sync22"])
def test_training_goes_on_on_servers(layout):
    expected = tfra_cases.after()
    found = run(layout, tfra_cases.moved).first
    assert_close(found, {what: expected[what] for what in found}, 1e-5)


@pytest.mark.parametrize("path", [TFRA / "files" / "ckpt-1", TFRA / "files", FOLDER])
def test_files_of_a_saver_have_what_the_checkpoint_has(path):
    tables = []
    for one in (TFRA / "checkpoint", path):
        tables.append(layer(optimizer="adam"))
        assert psp.tables.import_tfra(tables[-1], one, ITEMS) == 50
    one, other = tables
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(one.counts()[0], other.counts()[0])
    np.testing.assert_allclose(one.table.numpy(), other.table.numpy(), atol=1e-6)


def test_keys_without_slots_begin_with_the_optimizers_own(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "files")
    start = f"{USERS}_DynamicEmbedding_user_embedding-shadow_m_mht_1of2_rank0_size1"
    for end in ("keys", "values"):
        path = folder / f"{start}-{end}"
        # All but the last key, in another order.
        rows = np.fromfile(path, np.int64 if end == "keys" else "4f4")
        rows[:-1][::-1].tofile(path)
    whole, table = layer(optimizer="adam"), layer(optimizer="adam")
    assert psp.tables.import_tfra(whole, FOLDER, USERS) == 31
    assert psp.tables.import_tfra(table, folder, USERS, batch=5) == 31
    np.testing.assert_array_equal(table.table.numpy(), whole.table.numpy())
    found, expected = (momentum_of(one) for one in (table, whole))
    others = (found != expected).any(1)
    assert others.sum() == 1 and not found[others].any()


def test_what_does_not_fit_is_named(tmp_path):
    checkpoint = TFRA / "checkpoint"
    folder = shutil.copytree(FOLDER, tmp_path / "files")
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    data = damaged / "ckpt-1.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:2000])
    (tmp_path / "empty").mkdir()
    import_tfra = psp.tables.import_tfra
    for error, args, text in (
        (FileNotFoundError, (tmp_path / "empty",), "Received: path="),
        (FileNotFoundError, (tmp_path / "nothing-1",), "Received: path="),
        (ValueError, (checkpoint,), f"'{ITEMS}', '{USERS}'.*Received: table=None"),
        (ValueError, (checkpoint, "user"), "Received: table='user'"),
        (ValueError, (checkpoint, USERS), r"\['m', 'v'\].*has \[\] of the layer 't'.*Received: "),
    ):
        with pytest.raises(error, match=text):
            import_tfra(layer(), *args)
    with pytest.raises(OSError, match="Received: "):
        import_tfra(layer(), damaged, USERS, slots=False)
    with pytest.raises(ValueError, match=r"has \['accumulator'\] of .*with adagrad"):
        import_tfra(layer(optimizer="adagrad"), checkpoint, USERS)
    with pytest.raises(ValueError, match=r"0/.ATTRIBUTES/table-values' of .*Received: keys of sh"):
        import_tfra(layer(5), checkpoint, USERS, slots=False)
    with pytest.raises(ValueError, match="Received: a layer that is not built"):
        import_tfra(psp.layers.DynamicEmbedding(4), checkpoint, USERS)
    (folder / f"{USERS}_mht_1of2_rank0_size1-values").write_bytes(bytes(12))
    with pytest.raises(ValueError, match="rank0_size1-values' of .*Received: keys of shape"):
        import_tfra(layer(), folder, USERS, slots=False)
    (folder / f"{USERS}_mht_2of2_rank0_size1-keys").unlink()
    with pytest.raises(ValueError, match="has not the 2 shards of .*Received: "):
        import_tfra(layer(), folder, USERS, slots=False)


def arrays():
    keys = np.arange(10) * 2**40 - 7
    return keys, np.arange(40, dtype=np.float32).reshape(10, 4)


@pytest.mark.parametrize("is_text", [False, True])
def test_arrays_of_files(tmp_path, is_text):
    keys, rows = arrays()
    keys = keys.astype(str) if is_text else keys
    for name, array in (("keys", keys), ("rows", rows), ("m", rows + 1), ("v", rows + 2)):
        np.save(tmp_path / f"{name}.npy", array)
    paths = [tmp_path / f"{name}.npy" for name in ("keys", "rows", "m", "v")]
    table = layer(optimizer="adam")
    assert psp.tables.import_npy(table, *paths[:2], slots=paths[2:], batch=3) == 10
    np.testing.assert_array_equal(table(keys[:, np.newaxis]), rows)
    slots = table.table._value.optimizer.variables[-2:]
    assert (np.asarray(slots[1]) - np.asarray(slots[0]) == 1).all()
    np.save(tmp_path / "m.npy", rows[1:])
    with pytest.raises(ValueError, match="m.npy does not fit .*Received: keys of shape"):
        psp.tables.import_npy(table, *paths[:2], slots=paths[2:])
    paths[0].write_bytes(b"keys")
    with pytest.raises(OSError, match="Cannot read .*keys.npy as an array .*Received: "):
        psp.tables.import_npy(table, *paths[:2])


def test_parquet_needs_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="pip install pyarrow.*Received: path='a.parquet'"):
        psp.tables.import_parquet(layer(), "a.parquet")


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    keys, rows = arrays()
    path = tmp_path / "rows.parquet"

    def write(values):
        parquet.write_table(pyarrow.table({"id": keys, "row": values}), path)

    write(list(rows))
    table = layer()
    assert psp.tables.import_parquet(table, path, key="id", batch=3) == 10
    np.testing.assert_array_equal(table(keys[:, np.newaxis]), rows)
    with pytest.raises(ValueError, match="has the columns id, row.*Received: key='key'"):
        psp.tables.import_parquet(table, path)
    write([*rows[1:], rows[0][:3]])
    with pytest.raises(ValueError, match="'row' of .*Received: keys of shape"):
        psp.tables.import_parquet(table, path, key="id")
    path.write_bytes(b"rows")
    with pytest.raises(OSError, match="as Parquet. Received: "):
        psp.tables.import_parquet(table, path, key="id")
