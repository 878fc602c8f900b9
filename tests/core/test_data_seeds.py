"""Seeds of data: settled by Keras's seed, different from call to call, and taken from nobody."""

import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.core import seeds


@pytest.fixture(autouse=True)
def seeded():
    before = random.getstate()
    keras.utils.set_random_seed(5)
    yield
    random.setstate(before)


def test_what_is_drawn_afterwards_stays_the_same():
    expected = np.random.RandomState(5).rand(), random.Random(5).random()
    seeds.draw()
    assert (np.random.rand(), random.random()) == expected


def test_seeds_differ_until_the_seed_is_set_again():
    first = [seeds.draw() for _ in range(3)]
    random.random()
    first += [seeds.draw() for _ in range(2)]
    assert len(set(first)) == 5
    keras.utils.set_random_seed(5)
    assert [seeds.draw() for _ in range(3)] == first[:3]
    for seed in (6, 7):
        tf.random.set_seed(seed)
        first.append(seeds.draw())
    assert len(set(first)) == 7


def test_a_state_goes_on_elsewhere():
    seeds.draw()
    state = json.loads(json.dumps(seeds.state()))
    expected = [seeds.draw(), random.random()]
    random.random()
    seeds.draw()
    seeds.restore(state)
    assert [seeds.draw(), random.random()] == expected
