"""Workers draw alike without a seed, and data that differ are refused with the way out."""

import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.all_reduce.data import same_data
from tests.support.cluster import run
from tests.support.jobs import run_in_processes
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


def task():
    return tf.distribute.get_strategy().task.name


def model():
    one = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    one.compile(keras.optimizers.SGD(0.0), "mse")
    return one


def rows(number=24):
    x = np.random.default_rng(0).normal(size=(number, 3)).astype("float32")
    return x, x[:, :1]


class Augmented(keras.utils.PyDataset):
    """Batches with noise of numpy's, shuffled by numpy."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.order = x, y, np.random.permutation(len(x))

    def __len__(self):
        return len(self.x) // 8

    def __getitem__(self, index):
        part = self.order[8 * index : 8 * index + 8]
        return self.x[part] + np.random.normal(size=(8, 3)) / 10, self.y[part]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def generator(x, y):
    for number in range(3):
        yield x[8 * number : 8 * number + 8], y[8 * number : 8 * number + 8]


KINDS = {
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": 8},
    "dataset": lambda x, y: {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8)},
    "py_dataset": lambda x, y: {"x": Augmented(x, y)},
    "generator": lambda x, y: {"x": generator(x, y), "steps_per_epoch": 3},
}


def differing(kind):
    """As in scripts for Horovod and DDP: of each two rows, a worker has one."""
    x, y = rows(48)
    rank = int(task()[-1])
    data = KINDS[kind](x[rank::2], y[rank::2])
    if kind == "generator":  # Which may be random.
        model().fit(**data, verbose=0)
        return {}
    with pytest.raises(ValueError) as error:
        model().fit(**data, verbose=0)
    return {"message": str(error.value)}


def alike(kind):
    """What each worker draws first, and after `fit`, which draws nothing more than one process."""
    np.random.seed(3)
    model().fit(**KINDS[kind](*rows()), verbose=0)
    return {"drawn": np.random.rand(), "by_python": random.random()}


def own_shares():
    x, y = rows(48)
    rank = int(task()[-1])
    data = tf.data.Dataset.from_tensor_slices((x[rank::2], y[rank::2])).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return {"loss": model().evaluate(data.with_options(options), verbose=0)}


def without_a_seed():
    """Evaluates a model that predicts 0 on images that Keras has shuffled by numpy's numbers."""
    import json
    import pathlib
    import random
    import tempfile

    import keras
    import numpy as np
    import tensorflow as tf

    import keras_psplus as psp

    strategy = psp.MultiWorkerMirroredStrategy()
    with tempfile.TemporaryDirectory() as folder, strategy.scope():
        for number in range(17):
            path = pathlib.Path(folder, "ab"[number % 2], f"{number}.png")
            path.parent.mkdir(exist_ok=True)
            keras.utils.save_img(path, np.full((2, 2, 3), number, "uint8"), scale=False)
        options = {"batch_size": 4, "image_size": (2, 2), "verbose": False}
        data = keras.utils.image_dataset_from_directory(folder, **options)
        data = data.map(lambda x, y: (x, tf.reduce_mean(x, axis=[1, 2])[:, :1]))
        model = keras.Sequential(
            [
                keras.Input((2, 2, 3)),
                keras.layers.Flatten(),
                keras.layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        model.compile("sgd", "mse")
        losses = [model.evaluate(data, verbose=0) for _ in range(2)]
        kept, held_out = keras.utils.split_dataset(np.arange(8), left_size=4, shuffle=True)
    halves = [sorted(int(row) for row in half) for half in (kept, held_out)]
    print(json.dumps([losses, halves, random.random()]))


@pytest.mark.parametrize("kind", ["arrays", "dataset", "generator"])
def test_workers_with_other_rows_are_refused(kind):
    results = run("ar2", differing, kind=kind, may_show_errors=True)
    message = str(results.first.get("message", results.logs["worker-0"]))
    assert "The data of worker-0 and worker-1 differ" in message
    assert "AutoShardPolicy.OFF" in message and "in row 0 of array 0" in message


@pytest.mark.parametrize("kind", ["arrays", "generator", *extended("py_dataset")])
def test_comparing_draws_nothing(kind):
    run("ar2", alike, kind=kind)


def test_shares_of_each_worker_are_what_a_policy_says():
    x, y = rows(48)
    assert np.isfinite(run("ar2", own_shares).first["loss"])


def test_a_script_without_a_seed_draws_alike_on_all_workers():
    logs = run_in_processes(without_a_seed, workers=2, timeout=120).logs
    said = [log.splitlines()[-1] for log in logs.values()]
    assert said[0] == said[1]
    losses, _, _ = json.loads(said[0])
    np.testing.assert_allclose(losses, [np.mean(np.square(np.arange(17)))] * 2, rtol=1e-5)
    assert logs["worker-0"].count("all go on from seed") == 1


def test_data_of_any_kind_are_alike_to_themselves():
    data = {
        "strings": tf.constant([["x"], ["y"]]),
        "objects": np.array([object(), "u", 1], object),
        "dates": np.array(["2020"], "datetime64[D]"),
        "others": [np.array([1 + 2j]), tf.cast([np.nan], "bfloat16"), np.zeros((0, 3)), None, 5],
        "ragged": tf.ragged.constant([[1], [2, 3]]),
        "sparse": tf.sparse.from_dense([[1, 0]]),
    }
    first, second = (json.loads(json.dumps(same_data._samples(data))) for _ in range(2))
    assert len(first) == 6 and not same_data._difference(first, second)
    second[-1]["values"][1] = ["b'z'"]
    assert same_data._difference(first, second) == """"b'y'" and "b'z'" in row 1 of array 5"""
