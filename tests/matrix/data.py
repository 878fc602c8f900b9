"""Recipes of data: what makes them, each in `fit`, `evaluate` and `predict`."""

import pathlib
import struct
import tempfile
import wave

import keras
import numpy as np
import tensorflow as tf

from tests.matrix.training import compiled, fitted, integers, numbers, script

L, U = keras.layers, keras.utils
ROWS = 21


def _classifier(shape, **options):
    model = keras.Sequential([keras.Input(shape), L.Flatten(), L.Dense(4), L.Dense(2)])
    return compiled(model, keras.optimizers.SGD(0.01), "mse", **options)


def _used(model, data, is_shuffled=False):
    """Fits by data, and evaluates and predicts them."""
    model, found = fitted(model, data, batch_size=None, shuffle=None)
    found["evaluated"] = np.asarray(model.evaluate(data, verbose=0))
    predicted = model.predict(data, verbose=0)
    # Of shuffled rows, the order of predictions tells nothing.
    found["predicted"] = predicted[np.lexsort(predicted.T)] if is_shuffled else predicted
    return model, found


def _rows(rows=ROWS):
    return numbers(rows, 6), numbers(rows, 2, seed=1)


@script("data", "arrays")
def arrays():
    x, y = _rows()
    model, found = fitted(_classifier((6,)), x, y)
    found["evaluated"] = np.asarray(model.evaluate(x, y, batch_size=8, verbose=0))
    return model, found | {"predicted": model.predict(x, batch_size=5, verbose=0)}


@script("data", "shuffled arrays")
def shuffled_arrays():
    """By a seed of the data: Keras draws another order on several workers."""
    x, y = _rows()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=1).batch(8)
    model, found = fitted(_classifier((6,)), data, batch_size=None, shuffle=None)
    return model, found


@script("data", "tf.data")
def tf_data():
    data = tf.data.Dataset.from_tensor_slices(_rows()).batch(8).prefetch(2)
    return _used(_classifier((6,)), data)


class Batches(U.PyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = _rows()

    def __len__(self):
        return 3

    def __getitem__(self, index):
        part = slice(8 * index, 8 * index + 8)
        return self.x[part], self.y[part]


@script("data", "PyDataset")
def py_dataset():
    return _used(_classifier((6,)), Batches())


@script("data", "PyDataset with threads")
def py_dataset_with_threads():
    return _used(_classifier((6,)), Batches(workers=2, use_multiprocessing=False))


@script("data", "generator")
def generator():
    def batches():
        x, y = _rows()
        while True:
            for first in range(0, ROWS, 8):
                yield x[first : first + 8], y[first : first + 8]

    options = {"batch_size": None, "shuffle": None, "steps_per_epoch": 3}
    model, found = fitted(_classifier((6,)), batches(), **options)
    found["evaluated"] = np.asarray(model.evaluate(batches(), steps=3, verbose=0))
    return model, found


@script("data", "dictionaries")
def dictionaries():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    outputs = {"u": L.Dense(2, name="u")(L.Add()([a, b])), "v": L.Dense(2, name="v")(a)}
    model = keras.Model({"a": a, "b": b}, outputs)
    compiled(model, keras.optimizers.SGD(0.01), {"u": "mse", "v": "mae"})
    x, y = _rows()
    return fitted(model, {"a": x, "b": x[:, ::-1]}, {"u": y, "v": y[:, ::-1]})


@script("data", "split_dataset")
def split_dataset():
    first, rest = U.split_dataset(_rows(), left_size=0.7, shuffle=True, seed=1)
    model, found = fitted(
        _classifier((6,)),
        first.batch(8),
        batch_size=None,
        shuffle=None,
        validation=rest.batch(8),
    )
    return model, found


@script("data", "timeseries_dataset_from_array")
def timeseries():
    data = U.timeseries_dataset_from_array(
        numbers(40, 3),
        numbers(40, 2, seed=1),
        sequence_length=5,
        batch_size=8,
        shuffle=True,
        seed=1,
    )
    return _used(_classifier((5, 3)), data, is_shuffled=True)


def _files(write, suffix):
    folder = tempfile.TemporaryDirectory()
    for label in ("a", "b"):
        pathlib.Path(folder.name, label).mkdir()
        for number in range(9):
            write(
                pathlib.Path(folder.name, label, f"{number}{suffix}"), number + 10 * (label == "b")
            )
    return folder


def _trained_by(folder, make, model, **options):
    with folder:
        data = make(folder.name, batch_size=8, label_mode="categorical", **options)
        return _used(model, data, is_shuffled=True)


# Shuffled, and without a seed but that of the job.
@script("data", "image_dataset_from_directory")
def images():
    def write(path, number):
        image = numbers(6, 6, 3, seed=number, low=0.0, high=255.0)
        U.save_img(path, image, scale=False)

    folder = _files(write, ".png")
    model = keras.Sequential(
        [keras.Input((6, 6, 3)), L.Rescaling(1 / 255), L.Flatten(), L.Dense(2)]
    )
    compiled(model, keras.optimizers.SGD(0.01), "mse")
    return _trained_by(folder, U.image_dataset_from_directory, model, image_size=(6, 6))


@script("data", "text_dataset_from_directory")
def texts():
    def write(path, number):
        words = np.array(["one", "two", "three", "four"])[integers(6, below=4, seed=number)]
        path.write_text(" ".join(words))

    folder = _files(write, ".txt")
    vectors = L.TextVectorization(vocabulary=["one", "two", "three"], output_mode="count")
    model = keras.Sequential([keras.Input((), dtype="string"), vectors, L.Dense(2)])
    compiled(model, keras.optimizers.SGD(0.01), "mse")
    return _trained_by(folder, U.text_dataset_from_directory, model)


@script("data", "audio_dataset_from_directory")
def sounds():
    def write(path, number):
        samples = (numbers(32, seed=number) * 20_000).astype("int16")
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 8000, 32, "NONE", ""))
            file.writeframes(struct.pack("<32h", *samples))

    folder = _files(write, ".wav")
    model = _classifier((32, 1))
    return _trained_by(folder, U.audio_dataset_from_directory, model, output_sequence_length=32)
