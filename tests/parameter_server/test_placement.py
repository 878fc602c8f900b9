"""Variables are spread evenly over parameter servers, in whatever order a model makes them."""

import contextlib
import math
import pathlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.parameter_server.extended import Placement, bytes_on_ps, weights_of
from tests.parameter_server.options import options
from tests.support.cluster import equals_one_process, run
from tests.support.tables import for_each

PERCEPTRON = [
    shape
    for a, b in [(784, 1600), (1600, 1600), (1600, 700), (700, 10)]
    for shape in [(a, b), (b,)]
]
# Narrow at first, as many are: what is large comes last, or first.
CONVOLUTIONAL = [
    shape
    for a, b in [(3, 64), (64, 128), (128, 256), (256, 256)]
    for shape in [(3, 3, a, b), (b,), (b,), (b,)]
] + [(256 * 49, 512), (512,), (512, 10), (10,)]
ENCODER = [(8000, 256)] + 4 * ([(256, 256), (256,)] * 4 + [(256, 1024), (1024,), (1024, 256)])
FEW_ROWS = [(2, 300, 40), (100, 600), (3, 7000)] * 15


def place(shapes, weights, is_trained=lambda i: True):
    placement = Placement(weights)
    cuts = []
    for i, shape in enumerate(shapes):
        shards = placement.cut(shape, "float32", is_trained(i))
        assert [s.first for s in shards] == [0, *(s.end for s in shards[:-1])]
        assert shards[-1].end == shape[0] and all(s.first <= s.end for s in shards)
        row_bytes = 4 * math.prod(shape[1:])
        for shard in shards:
            placement.add(shard.ps, (shard.end - shard.first) * row_bytes, is_trained(i))
        cuts.append(shards)
    return placement, cuts


def worst(placement):
    sizes = placement.bytes_on_ps
    return max(size / weight for size, weight in zip(sizes, placement.weights)) / sum(sizes)


@for_each("shapes", [PERCEPTRON, CONVOLUTIONAL, ENCODER, FEW_ROWS])
@for_each("weights", [[1, 1], [1, 1, 1], [1] * 6, [0.5, 0.5, 1]])
def test_no_server_has_more_than_a_tenth_above_its_part(shapes, weights):
    orders = [shapes, shapes[::-1], sorted(shapes, key=math.prod)]
    orders += [random.Random(seed).sample(shapes, len(shapes)) for seed in range(10)]
    for order in orders:
        placement, _ = place(order, weights)
        assert sum(placement.bytes_on_ps) == sum(4 * math.prod(shape) for shape in shapes)
        assert worst(placement) <= 1.1, (order, placement.bytes_on_ps)


def test_what_is_trained_is_balanced_by_itself():
    """Since an optimizer's slots come to the same server, and none to what is not trained."""
    shapes = [(500, 500), (400, 1000)] * 5
    placement, cuts = place(shapes, [1, 1, 1], is_trained=lambda i: i % 2 == 0)
    trained = [0, 0, 0]
    for shape, shards in list(zip(shapes, cuts))[::2]:
        for shard in shards:
            trained[shard.ps] += (shard.end - shard.first) * 4 * shape[1]
    assert max(trained) <= 1.1 * np.mean(trained)
    assert worst(placement) <= 1.1


def test_shards_that_are_sent_one_after_the_other_are_fine():
    placement = Placement([1, 1], cuts_finely=True)
    shards = placement.cut((1000, 2000), "float32", True)
    # 8 MB, of which each server has four shards of 1 MiB or less.
    assert [shard.ps for shard in shards] == [0] * 4 + [1] * 4
    assert max(shard.end - shard.first for shard in shards) * 8000 <= 1 << 20
    # Very large ones are cut into eight on each server.
    assert len(placement.cut((100_000, 1000), "float32", True)) == 16
    assert len(placement.cut((10, 10), "float32", True)) == 1
    # A lookup asks each shard by itself.
    assert len(placement.cut((100_000, 1000), "float32", True, is_table=True)) == 2


def test_small_variables_stay_whole_and_go_where_least_is():
    placement, cuts = place([(64, 64), (100,), (60, 100), (30, 30)], [1, 1])
    assert [len(shards) for shards in cuts] == [1, 1, 1, 1]
    assert [shards[0].ps for shards in cuts] == [0, 1, 1, 0]
    # The last one has a host of its own.
    _, cuts = place([(64, 64)] * 4, [0.5, 0.5, 1])
    assert sorted(shards[0].ps for shards in cuts) == [0, 1, 2, 2]


def test_shards_are_neither_tiny_nor_too_large_to_send():
    _, [shards] = place([(4_900_000, 128)], [1, 1])
    assert len(shards) == 4 and [s.ps for s in shards] == [0, 0, 1, 1]
    _, [shards] = place([(90, 256)], [1] * 8)
    assert len(shards) == 2
    _, [shards] = place([(0, 256)], [1, 1])
    assert len(shards) == 1
    _, [shards] = place([(1, 1 << 22)], [1, 1])
    assert len(shards) == 1


def test_servers_of_one_host_share_its_link():
    assert weights_of(["a:1", "a:2", "b:1"]) == [0.5, 0.5, 1.0]


IDS, STEPS, BATCH = 1001, 6, 16
random_ = np.random.default_rng(0)
ids = random_.integers(0, IDS, (STEPS * BATCH, 3)).astype("int32")
labels = random_.normal(size=(STEPS * BATCH, 1)).astype("float32")


def made():
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Embedding(IDS, 64),
        keras.layers.Flatten(),
        keras.layers.Dense(701, activation="tanh"),
        keras.layers.Dense(5, activation="tanh"),
        keras.layers.Dense(1, use_bias=False),
    ]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers], name="placed")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model):
    model.fit(ids, labels, batch_size=BATCH, shuffle=False, verbose=0)


def rows_of_shards(model):
    return [shard.shape[0] for shard in model.layers[0].embeddings.value.shards]


def cut(strategy):
    with options(strategy, mode="sync"):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = made()
        fit(model)
        if strategy is None:
            return model, {}
        variables = model.trainable_variables
        for slot, variable in zip(model.optimizer._momentums, variables, strict=True):
            of_slot, of_variable = (
                [part.device for part in getattr(v.value, "shards", [v.value])]
                for v in (slot, variable)
            )
            assert of_slot == of_variable
        sizes = bytes_on_ps([*model.variables, *model.optimizer.variables], 2)
        assert max(sizes) <= 1.1 * sum(sizes) / 2, sizes
        # Rows that are looked up are those that are written.
        found = model.layers[0](ids[:5])
        np.testing.assert_array_equal(found, model.get_weights()[0][ids[:5]])
        return model, {}


@pytest.mark.extended
@pytest.mark.processes
def test_synchronous_training_with_cut_variables_equals_one_process():
    log = equals_one_process("async22", cut, tolerance=1e-4).logs["chief-0"]
    assert "'placed' on 2 parameter servers: 6 variables, 2 of them cut" in log


def files_of_other_placements_load(strategy, folder):
    folder = pathlib.Path(folder)

    def restored(path, rows):
        with strategy.scope():
            # A layer before it that stays whole: each of its variables is cut elsewhere.
            keras.layers.Dense(10).build((None, rows))
            model = made()
            model.optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(model=model).read(path).assert_existing_objects_matched()
        return model

    def values(model):
        return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]

    def check(model, expected):
        for a, b in zip(values(model), expected, strict=True):
            np.testing.assert_array_equal(a, b)

    with options(strategy):
        with psp.single_process():
            alone = made()
            fit(alone)
            alone.save(folder / "alone.keras")
            tf.train.Checkpoint(model=alone).write(str(folder / "alone"))
        with strategy.scope():
            loaded = keras.models.load_model(folder / "alone.keras")
        check(loaded, values(alone))
        check(restored(str(folder / "alone"), 217), values(alone))
        fit(loaded)
        tf.train.Checkpoint(model=loaded).write(str(folder / "cut"))
        other = restored(str(folder / "cut"), 111)
        assert rows_of_shards(loaded) != rows_of_shards(other)
        check(other, values(loaded))


@pytest.mark.processes
@pytest.mark.extended
def test_files_of_other_placements_load(tmp_path):
    run("async22", files_of_other_placements_load, folder=tmp_path)
