"""Row numbers of keys, of which many come and go."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.tables import chunks, index

KEYS = 3000


def test_keys_are_found_until_they_are_removed():
    found = index.KeyIndex()
    # Of one pattern in their lower bits.
    hashes = index.hashes_of(tf.range(KEYS, dtype=tf.int64) * 2**20)
    remove = tf.function(found.remove, autograph=False)
    for _ in range(3):
        found.insert(hashes, tf.range(KEYS))
        np.testing.assert_array_equal(found.find(hashes), np.arange(KEYS))
        for part in tf.split(hashes[: KEYS // 2], 30):
            remove(part)
        expected = np.where(np.arange(KEYS) < KEYS // 2, -1, np.arange(KEYS))
        np.testing.assert_array_equal(found.find(hashes), expected)
        remove(hashes[KEYS // 2 :])
    tf.function(found.clear, autograph=False)()
    assert (found.find(hashes).numpy() == -1).all()
    # Each part has memory of its own again.
    found.insert(hashes, tf.range(KEYS))
    np.testing.assert_array_equal(found.find(hashes), np.arange(KEYS))


@pytest.mark.parametrize("few", [1 << 10, 1 << 18])
def test_marks_of_removed_keys_do_not_fill_a_table(monkeypatch, few):
    monkeypatch.setattr(index, "_BUCKETS", 1 << 8)
    monkeypatch.setattr(index, "_FEW", few)
    # Those of the module may have been traced before.
    tables = index._are_many, index._handles
    insert = chunks.traced_once(index._insert, index._hashes, index._rows, *tables)
    rewrite = chunks.traced_once(index._rewrite, index._counts, index._counts, index._handles)
    monkeypatch.setattr(index, "_insert_all", insert)
    monkeypatch.setattr(index, "_rewrite_all", rewrite)
    found, written = index.KeyIndex(), 0
    count, some = 12_000, 400
    hashes = index.hashes_of(tf.range(count + 40 * some, dtype=tf.int64))
    missing = index.hashes_of(-1 - tf.range(2000, dtype=tf.int64))
    found.insert(hashes[:count], tf.range(count))
    remove = tf.function(found.remove, autograph=False)
    for first in range(0, 40 * some, some):
        before = found._removed.numpy()
        remove(hashes[first : first + some])
        written += np.count_nonzero(found._removed.numpy() < before)
        last = first + count
        found.insert(hashes[last : last + some], tf.range(last, last + some))
        # Fails where no bucket is empty.
        assert (found.find(missing).numpy() == -1).all()
    rows = np.arange(40 * some, count + 40 * some)
    np.testing.assert_array_equal(found.find(hashes[40 * some :]), rows)
    assert written > (40 if few < count else 2)
    assert bool(found._are_many) == (few < count)
