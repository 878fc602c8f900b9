"""Recipes of `keras.layers`: branches of one model, which reads an input of their kind.

```text
input -> before (trained) -> layer, layer, ... -> concatenated -> head
```
"""

import functools
import importlib.util
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.matrix.training import (
    ROWS,
    bundle,
    compiled,
    fitted,
    integers,
    numbers,
    script,
    trained,
    trained_branches,
)

L = keras.layers
WORDS = ["one", "two", "three", "four", "five"]
# By kind of input: the shape of a row, and rows.
INPUTS = {
    "rows": ((12,), lambda: numbers(ROWS, 12)),
    "sequences": ((6, 4), lambda: numbers(ROWS, 6, 4)),
    "images": ((8, 8, 3), lambda: numbers(ROWS, 8, 8, 3, low=0.0)),
    "volumes": ((4, 4, 4, 2), lambda: numbers(ROWS, 4, 4, 4, 2)),
    "waves": ((64,), lambda: numbers(ROWS, 64)),
    "tokens": ((7,), lambda: integers(ROWS, 7, below=30)),
    "words": ((1,), lambda: tf.constant(np.array(WORDS)[integers(ROWS, 1, below=5)])),
}
RATES = {"images": 1e-3, "volumes": 1e-3}
RECIPES = {kind: {} for kind in INPUTS}
# Layers that draw numbers, or take statistics of the rows that they see.
RANDOM, STATISTICS = {}, {}
# Not installed with the tests.
NEEDED = {"STFTSpectrogram": "scipy"}
# Keras reads no file of theirs, or something of their own is said of them.
ALONE = {"RandomShear", "SpectralNormalization"}


def program(kind, recipes):
    """The program of some layers of a kind."""

    def run(names):
        shape, rows = INPUTS[kind]
        dtype = {"tokens": "int32", "words": "string"}.get(kind, "float32")
        x = keras.Input(shape, dtype=dtype)
        h = x
        if dtype == "float32":
            h = L.Dense(shape[-1], name="before")(x)
        branches = [_flat(recipes[name](x, h)) for name in names]
        return trained_branches(x, branches, RATES.get(kind, 0.01), rows())

    return run


def _flat(x):
    x = L.Flatten()(x)
    return x if x.dtype == "float32" else L.Lambda(_as_floats)(x)


@keras.saving.register_keras_serializable("matrix")
def _as_floats(x):
    return keras.ops.cast(x, "float32") * 0.1


@keras.saving.register_keras_serializable("matrix")
def _waves(x):
    return keras.ops.sin(2.0 * x)


@keras.saving.register_keras_serializable("matrix")
class Twice(L.Wrapper):
    """A wrapper, which has no call by itself."""

    def call(self, x):
        return 2.0 * self.layer(x)


def one(layer):
    """A layer of the trained input."""
    return lambda x, h: layer()(h)


def raw(layer):
    """A layer of the input itself."""
    return lambda x, h: layer()(x)


def two(layer):
    """A layer of two tensors."""
    return lambda x, h: layer()([h, x])


RECIPES["rows"] |= {
    "Activation": one(lambda: L.Activation("tanh")),
    "ActivityRegularization": one(lambda: L.ActivityRegularization(l1=0.01, l2=0.02)),
    "Add": two(L.Add),
    "Average": two(L.Average),
    "Dense": one(lambda: L.Dense(6, "tanh")),
    "Discretization": raw(lambda: L.Discretization([-0.5, 0.0, 0.5])),
    "Dot": lambda x, h: L.Dot(axes=1)([h, x]),
    "ELU": one(L.ELU),
    "EinsumDense": one(lambda: L.EinsumDense("ab,bc->ac", 6, bias_axes="c")),
    "Flatten": one(L.Flatten),
    "Identity": one(L.Identity),
    "Lambda": one(lambda: L.Lambda(_waves)),
    "LayerNormalization": one(L.LayerNormalization),
    "LeakyReLU": one(L.LeakyReLU),
    "Maximum": two(L.Maximum),
    "Minimum": two(L.Minimum),
    "Multiply": two(L.Multiply),
    "Normalization": raw(lambda: L.Normalization(mean=[0.1] * 12, variance=[2.0] * 12)),
    "PReLU": one(L.PReLU),
    "RMSNormalization": one(L.RMSNormalization),
    "ReLU": one(lambda: L.ReLU(negative_slope=0.1)),
    "RepeatVector": one(lambda: L.RepeatVector(2)),
    "Reshape": one(lambda: L.Reshape((3, 4))),
    "Softmax": one(L.Softmax),
    "SpectralNormalization": one(lambda: L.SpectralNormalization(L.Dense(4))),
    "Subtract": two(L.Subtract),
    "UnitNormalization": one(L.UnitNormalization),
    "Wrapper": one(lambda: Twice(L.Dense(4))),
    "add": lambda x, h: L.add([h, x]),
    "average": lambda x, h: L.average([h, x]),
    "concatenate": lambda x, h: L.concatenate([h, x]),
    "dot": lambda x, h: L.dot([h, x], axes=1),
    "maximum": lambda x, h: L.maximum([h, x]),
    "minimum": lambda x, h: L.minimum([h, x]),
    "multiply": lambda x, h: L.multiply([h, x]),
    "subtract": lambda x, h: L.subtract([h, x]),
}
RECIPES["sequences"] |= {
    "AdditiveAttention": two(L.AdditiveAttention),
    "Attention": two(lambda: L.Attention(use_scale=True)),
    "Bidirectional": one(lambda: L.Bidirectional(L.GRU(3))),
    "Conv1D": one(lambda: L.Conv1D(4, 3)),
    "Conv1DTranspose": one(lambda: L.Conv1DTranspose(4, 3)),
    "DepthwiseConv1D": one(lambda: L.DepthwiseConv1D(3)),
    "GRU": one(lambda: L.GRU(4)),
    "GRUCell": one(lambda: L.RNN(L.GRUCell(4))),
    "GroupQueryAttention": lambda x, h: L.GroupQueryAttention(2, 4, 2)(h, h),
    "LSTM": one(lambda: L.LSTM(4, return_sequences=True)),
    "LSTMCell": one(lambda: L.RNN(L.LSTMCell(4))),
    "Masking": lambda x, h: L.LSTM(4)(L.Masking(0.5)(x)),
    "MultiHeadAttention": lambda x, h: L.MultiHeadAttention(2, 2)(h, x),
    "Permute": one(lambda: L.Permute((2, 1))),
    "RNN": one(lambda: L.RNN(L.SimpleRNNCell(4), go_backwards=True)),
    "SeparableConv1D": one(lambda: L.SeparableConv1D(4, 3)),
    "SimpleRNN": one(lambda: L.SimpleRNN(4)),
    "SimpleRNNCell": one(lambda: L.RNN(L.SimpleRNNCell(4))),
    "StackedRNNCells": one(lambda: L.RNN(L.StackedRNNCells([L.GRUCell(4), L.GRUCell(3)]))),
    "TimeDistributed": one(lambda: L.TimeDistributed(L.Dense(4))),
}
RECIPES["images"] |= {
    "AutoContrast": raw(lambda: L.AutoContrast(value_range=(0, 1))),
    "CenterCrop": one(lambda: L.CenterCrop(4, 4)),
    "ContrastLimitedAdaptiveHistogramEqualization": raw(
        lambda: L.ContrastLimitedAdaptiveHistogramEqualization(
            value_range=(0, 1), tile_grid_size=(2, 2)
        )
    ),
    "Conv2D": one(lambda: L.Conv2D(4, 3)),
    "Conv2DTranspose": one(lambda: L.Conv2DTranspose(4, 3)),
    "ConvLSTM1D": one(lambda: L.ConvLSTM1D(2, 3)),
    "DepthwiseConv2D": one(lambda: L.DepthwiseConv2D(3)),
    "Equalization": raw(lambda: L.Equalization(value_range=(0, 1))),
    "GroupNormalization": one(lambda: L.GroupNormalization(3)),
    "RandomGrayscale": raw(lambda: L.RandomGrayscale(1.0)),
    "Rescaling": one(lambda: L.Rescaling(2.0, 0.1)),
    "Resizing": one(lambda: L.Resizing(5, 5)),
    "SeparableConv2D": one(lambda: L.SeparableConv2D(4, 3)),
}
RECIPES["volumes"] |= {
    "Conv3D": one(lambda: L.Conv3D(2, 2)),
    "Conv3DTranspose": one(lambda: L.Conv3DTranspose(2, 2)),
    "ConvLSTM2D": one(lambda: L.ConvLSTM2D(2, 2)),
    "ConvLSTM3D": lambda x, h: L.ConvLSTM3D(2, 2)(L.Reshape((2, 4, 4, 2, 2))(h)),
}
# In one, two and three dimensions.
for _number, _kind in enumerate(("sequences", "images", "volumes"), 1):
    RECIPES[_kind] |= {
        name: one(functools.partial(getattr(L, name), *arguments))
        for name, arguments in {
            f"AdaptiveAveragePooling{_number}D": (2,),
            f"AdaptiveMaxPooling{_number}D": (2,),
            f"AveragePooling{_number}D": (2,),
            f"MaxPooling{_number}D": (2,),
            f"GlobalAveragePooling{_number}D": (),
            f"GlobalMaxPooling{_number}D": (),
            f"Cropping{_number}D": (),
            f"UpSampling{_number}D": (2,),
            f"ZeroPadding{_number}D": (),
        }.items()
        if hasattr(L, name)
    }
    RANDOM[f"SpatialDropout{_number}D"] = (
        _kind,
        one(functools.partial(getattr(L, f"SpatialDropout{_number}D"), 0.2)),
    )
RECIPES["waves"] |= {
    "MelSpectrogram": raw(
        lambda: keras.Sequential(
            [
                L.MelSpectrogram(
                    fft_length=16, sequence_stride=8, num_mel_bins=4, sampling_rate=64, min_freq=1.0
                ),
                L.Rescaling(0.01),
            ]
        )
    ),
    "STFTSpectrogram": lambda x, h: L.STFTSpectrogram(frame_length=16, frame_step=8)(
        L.Reshape((64, 1))(h)
    ),
}
RECIPES["tokens"] |= {
    "CategoryEncoding": raw(lambda: L.CategoryEncoding(30, "count")),
    "Embedding": raw(lambda: L.Embedding(30, 4)),
    "HashedCrossing": lambda x, h: L.HashedCrossing(20)((x[:, 0], x[:, 1])),
    "Hashing": raw(lambda: L.Hashing(20)),
    "IntegerLookup": raw(lambda: L.IntegerLookup(vocabulary=list(range(10)))),
    "ReversibleEmbedding": lambda x, h: there_and_back(L.ReversibleEmbedding(30, 4), x),
}


def there_and_back(table, x):
    """Logits of a table's own keys, of the rows that it looks up."""
    return table(L.Dense(4, "tanh")(table(x)), reverse=True)


RECIPES["words"] |= {
    "StringLookup": raw(lambda: L.StringLookup(vocabulary=WORDS[:3], output_mode="multi_hot")),
    "TextVectorization": raw(
        lambda: L.TextVectorization(vocabulary=WORDS[:3], output_mode="count")
    ),
}
STATISTICS |= {
    "BatchNormalization": one(lambda: L.BatchNormalization(momentum=0.8)),
}
RANDOM |= {
    "AlphaDropout": ("rows", one(lambda: L.AlphaDropout(0.2))),
    "AugMix": ("images", raw(lambda: L.AugMix((0, 1)))),
    "Dropout": ("rows", one(lambda: L.Dropout(0.2))),
    "GaussianDropout": ("rows", one(lambda: L.GaussianDropout(0.2))),
    "GaussianNoise": ("rows", one(lambda: L.GaussianNoise(0.2))),
    "Pipeline": ("images", raw(lambda: L.Pipeline([L.RandomFlip(), L.Rescaling(2.0)]))),
    "RandAugment": ("images", raw(lambda: L.RandAugment((0, 1)))),
    "RandomBrightness": ("images", raw(lambda: L.RandomBrightness(0.2, (0, 1)))),
    "RandomColorDegeneration": ("images", raw(lambda: L.RandomColorDegeneration(0.5, (0, 1)))),
    "RandomColorJitter": (
        "images",
        raw(lambda: L.RandomColorJitter((0, 1), 0.2, 0.2, 0.2, 0.2)),
    ),
    "RandomContrast": ("images", raw(lambda: L.RandomContrast(0.2, (0, 1)))),
    "RandomCrop": ("images", lambda x, h: L.Resizing(4, 4)(L.RandomCrop(4, 4)(x))),
    "RandomElasticTransform": (
        "images",
        raw(lambda: L.RandomElasticTransform(1.0, 1.0, value_range=(0, 1))),
    ),
    "RandomErasing": ("images", raw(lambda: L.RandomErasing(1.0, value_range=(0, 1)))),
    "RandomFlip": ("images", raw(L.RandomFlip)),
    "RandomGaussianBlur": ("images", raw(lambda: L.RandomGaussianBlur(1.0, value_range=(0, 1)))),
    "RandomHue": ("images", raw(lambda: L.RandomHue(0.5, (0, 1)))),
    "RandomInvert": ("images", raw(lambda: L.RandomInvert(0.5, (0, 1)))),
    "RandomPerspective": ("images", raw(L.RandomPerspective)),
    "RandomPosterization": ("images", raw(lambda: L.RandomPosterization(4, (0, 1)))),
    "RandomRotation": ("images", raw(lambda: L.RandomRotation(0.2))),
    "RandomSaturation": ("images", raw(lambda: L.RandomSaturation(0.5, (0, 1)))),
    "RandomSharpness": ("images", raw(lambda: L.RandomSharpness(0.5, (0, 1)))),
    "RandomShear": ("images", raw(lambda: L.RandomShear(0.2, 0.2))),
    "RandomTranslation": ("images", raw(lambda: L.RandomTranslation(0.2, 0.2))),
    "RandomZoom": ("images", raw(lambda: L.RandomZoom(0.2))),
    "Solarization": ("images", raw(lambda: L.Solarization(0.5, 0.5, (0, 1)))),
}
# Applied to datasets of dicts or of images and labels.
IN_DATASETS = {
    "CutMix": lambda: L.CutMix(seed=1),
    "MixUp": lambda: L.MixUp(seed=1),
    "MaxNumBoundingBoxes": lambda: L.MaxNumBoundingBoxes(
        3, fill_value=-1, bounding_box_format="xyxy"
    ),
}
# Parts of every model here.
EVERYWHERE = ("Concatenate", "Input", "InputLayer", "InputSpec", "Layer")
_MOST = 12


def _is_installed(package):
    return package is None or importlib.util.find_spec(package) is not None


def _add(title, kind, recipes):
    names = sorted(n for n in recipes if hasattr(L, n) and _is_installed(NEEDED.get(n)))
    for name in ALONE.intersection(names):
        bundle("layers", f"layers: {title}, {name}", (name,), program(kind, recipes))
        names.remove(name)
    for first in range(0, len(names), _MOST):
        some = names[first : first + _MOST]
        number = f" {first // _MOST + 1}" if len(names) > _MOST else ""
        bundle("layers", f"layers: {title}{number}", some, program(kind, recipes))


for _kind, _recipes in RECIPES.items():
    _add(f"of {_kind}", _kind, _recipes)
    _drawing = {name: recipe for name, (kind, recipe) in RANDOM.items() if kind == _kind}
    if _drawing:
        _add(f"random, of {_kind}", _kind, _drawing)
_add("statistics of rows", "rows", STATISTICS)


def _everywhere(names):
    x = L.Input((12,))
    h = L.Concatenate()([Scaled()(x), L.Dense(4, "tanh")(x)])
    model = keras.Sequential([L.InputLayer((12,)), keras.Model(x, h), L.Dense(2)])
    compiled(model, keras.optimizers.SGD(0.05), "mse")
    return trained(model, numbers(ROWS, 12), numbers(ROWS, 2, seed=1))


@keras.saving.register_keras_serializable("matrix")
class Scaled(L.Layer):
    """A layer of one's own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")
        self.input_spec = L.InputSpec(ndim=len(shape))

    def call(self, x):
        return x * self.scale


bundle("layers", "layers: of every model", EVERYWHERE, _everywhere)


@script("layers", "TFSMLayer")
def tfsm_layer():
    """A model that was exported, as a layer below trained ones."""
    with tempfile.TemporaryDirectory() as folder:
        source = keras.Sequential([keras.Input((12,)), L.Dense(5, "tanh")])
        source.export(folder, verbose=False)
        x = keras.Input((12,))
        layer = L.TFSMLayer(folder, call_endpoint="serve")
        model = keras.Model(x, L.Dense(2)(L.Dense(4)(layer(x))))
        compiled(model, keras.optimizers.SGD(0.05), "mse")
        _, found = trained(model, numbers(ROWS, 12), numbers(ROWS, 2, seed=1))
        kernels = [layer.kernel for layer in model.layers if isinstance(layer, L.Dense)]
        return None, found | {
            f"kernel/{i}": keras.ops.convert_to_numpy(kernel) for i, kernel in enumerate(kernels)
        }


def _in_dataset(name):
    def run(names):
        layer = IN_DATASETS[name]()
        images, labels = (
            numbers(16, 8, 8, 3, low=0.0),
            np.eye(4, dtype="float32")[integers(16, below=4)],
        )
        boxes = np.tile(numbers(16, 1, 4, low=0.0), (1, 5, 1))
        rows = {"images": images, "labels": labels}
        if name == "MaxNumBoundingBoxes":
            classes = integers(16, 5, below=4).astype("float32")
            rows = {"images": images, "bounding_boxes": {"boxes": boxes, "labels": classes}}
        data = tf.data.Dataset.from_tensor_slices(rows).batch(8)
        data = data.map(lambda row: layer(row, training=True))
        if name == "MaxNumBoundingBoxes":
            data = data.map(lambda row: (row["images"], row["bounding_boxes"]["boxes"][:, 0]))
        else:
            data = data.map(lambda row: (row["images"], row["labels"]))
        model = keras.Sequential([keras.Input((8, 8, 3)), L.Flatten(), L.Dense(4)])
        compiled(model, keras.optimizers.SGD(0.01), "mse")
        return fitted(model, data, batch_size=None, shuffle=None)

    return run


for _name in IN_DATASETS:
    bundle("layers", f"layers: {_name} in a dataset", (_name,), _in_dataset(_name))
