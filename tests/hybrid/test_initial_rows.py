"""A table's first value: that of one process, made without having all of it in memory."""

import pathlib
import sys

import keras
import numpy as np
import pytest

from keras_psplus.hybrid import rows as initial_rows
from tests.support.jobs import run_script
from tests.support.tables import for_each

JOB = pathlib.Path(__file__).with_name("initial_rows_job.py")
INITIALIZERS = {
    "uniform": keras.initializers.RandomUniform(-0.3, 0.7, seed=1),
    "normal": keras.initializers.RandomNormal(0.5, 2.0, seed=2),
    "truncated": keras.initializers.TruncatedNormal(-0.5, 2.0, seed=3),
    "glorot": keras.initializers.GlorotUniform(seed=4),
    "he": keras.initializers.HeNormal(seed=5),
    "constant": keras.initializers.Constant(1.5),
    "ones": keras.initializers.Ones(),
    "zeros": keras.initializers.Zeros(),
}
WHOLE = {
    "identity": keras.initializers.Identity(),
    "orthogonal": keras.initializers.Orthogonal(seed=6),
}


def make(name, initializer, rows, dim, servers):
    """All servers' rows, in the order of the table."""
    spec = {
        "key": 0,
        "name": name,
        "rows": rows,
        "dim": dim,
        "initializer": keras.initializers.serialize(initializer),
    }
    table = np.empty([rows, dim], "float32")
    for server in range(servers):
        table[server::servers] = initial_rows.make_variable(spec, server, servers)
    return table


@for_each("name, servers", [*((name, 3) for name in [*INITIALIZERS, *WHOLE]), ("uniform", 1)])
def test_rows_are_those_of_one_process_and_made_by_parts(name, servers, monkeypatch):
    rows, dim = (40, 30) if name in WHOLE else (1003, 5)
    # Parts of 8 rows; also a number of rows that is not one of whole parts.
    monkeypatch.setattr(initial_rows, "_PART_BYTES", 8 * 4 * dim)
    initializer = {**INITIALIZERS, **WHOLE}[name]
    table = make(name, initializer, rows, dim, servers)
    np.testing.assert_array_equal(table, initializer((rows, dim), dtype="float32"))
    if name in INITIALIZERS:
        config = keras.initializers.serialize(initializer)
        parts = [len(values) for _, values in initial_rows._ranges(config, (rows, dim), 0)]
        assert parts == [8] * 125 + [3]


def test_a_table_of_blocks_is_that_of_before(monkeypatch):
    rows, dim, servers = 300, 5, 2
    monkeypatch.setattr(initial_rows, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(initial_rows, "_BLOCK_ROWS", 64)
    expected = np.empty([rows, dim], "float32")
    for server in range(servers):
        blocks = []
        for first in range(0, 150, 64):
            initializer = keras.initializers.RandomNormal(seed=hash((7, server, first)) % (1 << 31))
            blocks.append(initializer((min(64, 150 - first), dim), dtype="float32"))
        expected[server::servers] = np.concatenate(blocks)
    initializer = keras.initializers.RandomNormal(seed=7)
    for part_bytes in (100, 1 << 20):
        monkeypatch.setattr(initial_rows, "_PART_BYTES", part_bytes)
        np.testing.assert_array_equal(make("blocks", initializer, rows, dim, servers), expected)


@pytest.mark.processes
@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_server_has_little_more_than_its_part_in_memory():
    # If it were less, what is measured would not be the table.
    assert 0.95 < float(run_script(JOB).splitlines()[-1]) <= 1.3
