"""Whole values come and go in pieces."""

import numpy as np
import tensorflow as tf

from keras_psplus.sharding import variable as variable_module
from keras_psplus.sharding.places import AxisCut, PieceCut, Place
from keras_psplus.sharding.variable import ShareVariable
from tests.support.tables import for_each

WHOLE = np.random.RandomState(1).randn(7, 5).astype("float32")


class Store:
    """What one of three workers has."""

    workers, device, restoring, route = 3, "CPU:0", False, None

    def __init__(self, rank):
        self.rank = rank

    def add(self, variable, form, name):
        return 0


class Collectives:
    """Those of a worker whose peers have nothing, or all that there is, of a value."""

    def __init__(self, whole):
        self._flat, self.sizes = whole.ravel(), []

    def all_reduce(self, tensor):
        begin = sum(self.sizes)
        self.sizes.append(int(tf.size(tensor)))
        return tensor + self._flat[begin : begin + self.sizes[-1]].reshape(tensor.shape)


class Rows:
    """A route along which the others' columns come."""

    workers = 3

    def __init__(self, rows):
        self._rows, self.widths = rows, []

    def gather(self, row):
        begin = sum(self.widths)
        self.widths.append(row.shape[1])
        return tf.constant(self._rows[:, begin : begin + row.shape[1]])


def made(rank, shape=WHOLE.shape):
    def initial(place, shape):
        return tf.zeros(shape)

    place = Place.of_parts(shape, 3)
    return ShareVariable(Store(rank), shape, tf.float32, "v", lambda: place, initial)


@for_each("rank", range(3))
def test_pieces(monkeypatch, rank):
    monkeypatch.setattr(variable_module, "_PIECE_BYTES", 4 * 8)
    one, rows = made(rank), np.pad(WHOLE.ravel(), [0, 1]).reshape(3, 12)
    # The chief has the value, from which zeros come for it.
    launcher = Collectives(np.zeros_like(WHOLE) if rank == 0 else WHOLE)
    one.receive(launcher, tf.constant(WHOLE) if rank == 0 else None)
    assert launcher.sizes == [8, 8, 8, 8, 3]
    np.testing.assert_array_equal(one.part, rows[rank])
    route = Rows(rows)
    np.testing.assert_array_equal(one.collected(route, True), WHOLE)
    assert route.widths == 6 * [2]
    assert one.collected(Rows(rows), False) is None


@for_each("rank", range(3))
def test_pieces_of_a_part_that_is_rows(monkeypatch, rank):
    monkeypatch.setattr(variable_module, "_PIECE_BYTES", 4 * 8)
    whole = WHOLE[:6]
    one = made(rank, whole.shape)
    launcher = Collectives(np.zeros_like(whole) if rank == 0 else whole)
    one.receive(launcher, tf.constant(whole) if rank == 0 else None)
    assert launcher.sizes == 6 * [5]
    np.testing.assert_array_equal(one.part, whole[2 * rank : 2 * rank + 2])
    rows = whole.reshape(3, 10)
    np.testing.assert_array_equal(one.collected(Rows(rows), True), whole)


@for_each("axis", [None, 0, 1])
@for_each("rows", [2, 3])
def test_pieces_of_parts_along_an_axis(monkeypatch, axis, rows):
    monkeypatch.setattr(variable_module, "_PIECE_BYTES", 4 * 8)
    whole = tf.reshape(tf.range(1.0, 25.0), [4, 6])
    split = None if axis is None else AxisCut(whole.shape, axis, 2, copies=rows)
    local = whole.shape if split is None else tf.TensorShape(split.shard)
    place = Place(PieceCut(split, Place.of_parts(local, rows).parts, 2))
    for rank in range(2 * rows):
        ways = lambda: place, lambda place, shape: tf.zeros(shape)
        one = ShareVariable(Store(rank), whole.shape, tf.float32, "v", *ways)
        launcher = Collectives(np.zeros(24) if rank == 0 else place.in_order(whole).numpy())
        one.receive(launcher, whole if rank == 0 else None)
        assert len(launcher.sizes) > 2
        np.testing.assert_array_equal(one.part, place.local_part(whole, rank))


@for_each("shape", [(6, 0), (3, 1 << 19)])
def test_matrices_with_empty_or_long_rows_have_flat_parts(shape):
    assert Place.of_parts(shape, 3).cut.shard == (shape[0] * shape[1] // 3,)
