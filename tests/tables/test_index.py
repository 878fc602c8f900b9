"""Row numbers of keys, of which many come and go."""

import numpy as np
import tensorflow as tf

from keras_psplus.tables.rows import index

KEYS = 3000


def test_keys_are_found_until_they_are_removed(monkeypatch):
    monkeypatch.setattr(index, "_LEAST_REMOVED", 50)
    found = index.KeyIndex()
    rewritten = []
    monkeypatch.setattr(found, "_import_empty", spy(found._import_empty, rewritten))
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
    assert rewritten
    tf.function(found.clear, autograph=False)()
    assert (found.find(hashes).numpy() == -1).all()


def spy(function, calls):
    def called(*args):
        calls.append(args)
        return function(*args)

    return called
