"""Row numbers of keys, of which many come and go."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.tables.rows import index

KEYS = 3000


@pytest.mark.parametrize("most", [KEYS, KEYS - 1])
def test_keys_are_found_until_they_are_removed(most, monkeypatch):
    # In one part, and in many.
    monkeypatch.setattr(index, "_MOST_OF_ONE", most)
    found = index.KeyIndex()
    # Of one pattern in their lower bits.
    hashes = index.hashes_of(tf.range(KEYS, dtype=tf.int64) * 2**20)
    remove = tf.function(found.remove, autograph=False)
    for _ in range(3):
        for part, rows in zip(tf.split(hashes, 3), tf.split(tf.range(KEYS), 3)):
            found.insert(part, rows)
        np.testing.assert_array_equal(found.find(hashes), np.arange(KEYS))
        for part in tf.split(hashes[: KEYS // 2], 30):
            remove(part)
        expected = np.where(np.arange(KEYS) < KEYS // 2, -1, np.arange(KEYS))
        np.testing.assert_array_equal(found.find(hashes), expected)
        remove(hashes[KEYS // 2 :])
    tf.function(found.clear, autograph=False)()
    assert (found.find(hashes).numpy() == -1).all()


@pytest.mark.parametrize(("most", "least"), [(1 << 17, 2), (0, 41)])
def test_marks_of_removed_keys_do_not_fill_a_part(most, least, monkeypatch):
    monkeypatch.setattr(index, "_BUCKETS", 1 << 8)
    monkeypatch.setattr(index, "_MOST_OF_ONE", most)
    found, written = index.KeyIndex(), []
    used = found._many if most == 0 else found._one
    monkeypatch.setattr(used, "_write_again", spy(used._write_again, written))
    count, some = 12_000, 400
    hashes = index.hashes_of(tf.range(count + 40 * some, dtype=tf.int64))
    missing = index.hashes_of(-1 - tf.range(2000, dtype=tf.int64))
    found.insert(hashes[:count], tf.range(count))
    remove = tf.function(found.remove, autograph=False)
    for first in range(0, 40 * some, some):
        remove(hashes[first : first + some])
        last = first + count
        found.insert(hashes[last : last + some], tf.range(last, last + some))
        # Fails where no bucket is empty.
        assert (found.find(missing).numpy() == -1).all()
    rows = np.arange(40 * some, count + 40 * some)
    np.testing.assert_array_equal(found.find(hashes[40 * some :]), rows)
    assert len(written) >= least


def spy(function, calls):
    def called(*args):
        calls.append(args)
        return function(*args)

    return called
