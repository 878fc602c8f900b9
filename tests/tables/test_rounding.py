"""Rounding to bfloat16 at random: right on average, and the same wherever a row lies."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_psplus.tables import rounding
from keras_psplus.tables.keys import random_16_bits
from tests.support.tiers import extended
from tests.tables.test_store import DIM, Servers, batches, small_chunks

__all__ = ["small_chunks"]
DRAWS = 4096
KEYS = tf.range(DRAWS, dtype=tf.int64) * 12345 - 2**61
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def at_random(values, update=7, column=1):
    args = tf.constant(values), KEYS[: len(values)], tf.constant(update, tf.int64), column
    return rounding.at_random(*args).numpy()


def bits_of(values):
    return np.asarray(values, np.float32).view(np.uint32)


@settings(max_examples=60, deadline=None)
@given(value=floats.filter(lambda v: abs(v) < 3e38), update=st.integers(0, 2**40))
def test_a_number_is_right_on_average_and_one_of_its_neighbours(value, update):
    below = bits_of(value) & 0xFFFF0000
    fraction = float(bits_of(value) & 0xFFFF) / 2**16
    found = bits_of(at_random(np.full([DRAWS, 1], value, np.float32), update))
    is_up = found == below + 0x10000  # away from zero
    assert (is_up | (found == below)).all()
    # Six standard deviations.
    most = 6 * np.sqrt(fraction * (1 - fraction) / DRAWS)
    assert abs(is_up.mean() - fraction) <= most


@settings(max_examples=60, deadline=None)
@given(st.lists(floats, min_size=1, max_size=40))
def test_numbers_of_bfloat16_stay(values):
    kept = (bits_of(values) & 0xFFFF0000).view(np.float32)[:, np.newaxis]
    np.testing.assert_array_equal(bits_of(at_random(kept)), bits_of(kept))


def test_what_is_no_number_stays_so():
    special = np.array(
        [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000],
        np.uint32,
    )
    rows = np.tile(special.view(np.float32), [DRAWS, 1])
    found = at_random(rows)
    assert np.isnan(found[:, 2:6]).all() and np.isinf(found[:, :2]).all()
    np.testing.assert_array_equal(bits_of(found[:, [0, 1, 6]]), bits_of(rows[:, [0, 1, 6]]))


def test_bits_depend_on_key_update_column_and_place():
    def bits(update=3, column=0):
        found = random_16_bits(KEYS, tf.constant(update, tf.int64), column, 6).numpy()
        return found.astype(np.float64).ravel()

    one = bits()
    np.testing.assert_array_equal(one, bits())
    assert abs(one.mean() / 2**15 - 1) < 0.02
    by_place = one.reshape(-1, 6)
    others = [bits(update=4), bits(column=1), np.roll(one, 6), np.roll(by_place, 1, 1).ravel()]
    assert max(abs(np.corrcoef(one, other)[0, 1]) for other in others) < 0.03


@pytest.mark.parametrize("slots", ["bfloat16", *extended("float32")])
def test_rows_are_the_same_on_any_number_of_servers(slots):
    types = {"rows_dtype": "bfloat16", "slots_dtype": slots}
    every = [Servers(count=count, **types) for count in (1, 2)]
    exact = Servers()
    for keys, gradient in batches():
        for servers in (*every, exact):
            servers.step(keys, gradient)
    keys = np.array(sorted(exact.contents()))
    one, two = (servers.lookup(keys) for servers in every)
    np.testing.assert_array_equal(one, two)
    assert not (bits_of(one) & 0xFFFF).any()
    expected = exact.lookup(keys)
    np.testing.assert_allclose(one, expected, rtol=0.05, atol=0.05)
    assert (one != expected).mean() > 0.9
    store = every[0].stores[0]
    assert [column.stored.size for column in store.columns] == [2, 4 if slots == "float32" else 2]
    # Initial rows that a step reads are those that it then updates.
    new = np.array([2**62], np.int64)
    before = every[0].lookup(new, trains=True)
    every[0].step(new, np.zeros([1, DIM], np.float32))
    np.testing.assert_array_equal(every[0].lookup(new), before)
