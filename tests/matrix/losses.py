"""Recipes of losses and metrics: heads of one model, which has a table of embeddings."""

import keras
import numpy as np

from tests.matrix.training import ROWS, bundle, compiled, integers, numbers, trained

L = keras.layers


def _onehot(rows, classes, seed=0):
    return np.eye(classes, dtype="float32")[integers(rows, below=classes, seed=seed)]


# By kind of target: what the head ends with, and the targets.
HEADS = {
    "binary": (lambda: L.Dense(3, "sigmoid"), lambda: (numbers(ROWS, 3) > 0).astype("float32")),
    "one of four": (lambda: L.Dense(4, "softmax"), lambda: _onehot(ROWS, 4)),
    "index": (lambda: L.Dense(4, "softmax"), lambda: integers(ROWS, below=4)),
    "numbers": (lambda: L.Dense(3), lambda: numbers(ROWS, 3, seed=2)),
    "positive": (lambda: L.Dense(3, "softplus"), lambda: numbers(ROWS, 3, low=0.5, high=2.0)),
    "signs": (lambda: L.Dense(3, "tanh"), lambda: np.sign(numbers(ROWS, 3))),
    "labels": (
        lambda: keras.Sequential([L.Dense(24), L.Reshape((6, 4))]),
        lambda: 1 + integers(ROWS, 3, below=3),
    ),
    "mask": (
        lambda: keras.Sequential([L.Dense(16, "sigmoid"), L.Reshape((4, 4, 1))]),
        lambda: (numbers(ROWS, 4, 4, 1) > 0).astype("float32"),
    ),
    "classes": (lambda: keras.Sequential([L.Dense(1), Rounded()]), lambda: _classes()),
}


def _classes():
    return integers(ROWS, 1, below=3).astype("float32")


@keras.saving.register_keras_serializable("matrix")
class Rounded(L.Layer):
    """A class from 0 to 2, as a number; no gradient goes through."""

    def call(self, x):
        return keras.ops.clip(keras.ops.round(2.0 * keras.ops.stop_gradient(x) + 1.0), 0.0, 2.0)


def _embedded():
    """Tokens, and their rows of a table."""
    tokens = keras.Input((4,), dtype="int32")
    return tokens, L.Flatten()(L.Embedding(30, 4, name="table")(tokens))


def _model(heads):
    """A model of heads by name, each of a kind."""
    tokens, h = _embedded()
    h = L.Dense(8, "tanh", name="shared")(h)
    outputs = {}
    for name, kind in heads.items():
        outputs[name] = L.Identity(name=name)(HEADS[kind][0]()(h))
    return keras.Model(tokens, outputs)


def _data(heads):
    return integers(ROWS, 4, below=30), {name: HEADS[kind][1]() for name, kind in heads.items()}


LOSSES = {
    "binary": ("BinaryCrossentropy", "BinaryFocalCrossentropy"),
    "one of four": (
        *("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "CategoricalHinge"),
        "KLDivergence",
    ),
    "index": ("CategoricalGeneralizedCrossEntropy", "SparseCategoricalCrossentropy"),
    "numbers": ("CosineSimilarity", "Huber", "LogCosh", "MeanAbsoluteError", "MeanSquaredError"),
    "positive": ("MeanAbsolutePercentageError", "MeanSquaredLogarithmicError", "Poisson"),
    "signs": ("Hinge", "SquaredHinge"),
    "labels": ("CTC",),
}
FUNCTIONS = {
    "binary": ("binary_crossentropy", "binary_focal_crossentropy"),
    "one of four": (
        *("categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge"),
        "kl_divergence",
    ),
    "index": ("categorical_generalized_cross_entropy", "sparse_categorical_crossentropy"),
    "numbers": (
        *("cosine_similarity", "huber", "log_cosh", "mean_absolute_error"),
        "mean_squared_error",
    ),
    "positive": (*("mean_absolute_percentage_error", "mean_squared_logarithmic_error", "poisson"),),
    "signs": ("hinge", "squared_hinge"),
    "labels": ("ctc",),
}
OPTIONS = {
    "Dice": {"axis": (1, 2, 3)},
    "Tversky": {"axis": (1, 2, 3)},
    "CategoricalGeneralizedCrossEntropy": {"q": 0.6},
}


@keras.saving.register_keras_serializable("matrix")
class Quartic(keras.losses.Loss):
    """A loss of one's own."""

    def call(self, y_true, y_pred):
        return keras.ops.mean((y_pred - y_true) ** 4, axis=-1)


def _kinds(table):
    return {name: kind for kind, names in table.items() for name in names}


def _losses(kinds, make):
    def run(names):
        heads = {f"of_{name}": kinds[name] for name in names}
        model = _model(heads)
        losses = {f"of_{name}": make(name) for name in names}
        weights = {
            name: 0.01 if "Percentage" in name or "percentage" in name else 1.0 for name in losses
        }
        compiled(model, keras.optimizers.SGD(0.05), losses, loss_weights=weights)
        return trained(model, *_data(heads))

    return run


def _loss(name):
    if name == "Loss":
        return Quartic()
    return getattr(keras.losses, name)(**OPTIONS.get(name, {}))


def _function(name):
    return (
        _generalized
        if name == "categorical_generalized_cross_entropy"
        else getattr(keras.losses, name)
    )


@keras.saving.register_keras_serializable("matrix")
def _generalized(y_true, y_pred):
    return keras.losses.categorical_generalized_cross_entropy(y_true, y_pred, q=0.6)


def _present(module, names):
    return [name for name in names if hasattr(module, name)]


_CLASSES = _kinds(LOSSES) | {"Loss": "numbers"}
_FUNCTIONS = _kinds(FUNCTIONS)
bundle("losses", "losses", _present(keras.losses, _CLASSES), _losses(_CLASSES, _loss))
bundle(
    "losses",
    "losses that are functions",
    _present(keras.losses, _FUNCTIONS),
    _losses(_FUNCTIONS, _function),
)
_SEGMENTS = {"Dice": "mask", "Tversky": "mask"}
bundle("losses", "losses of segments", tuple(_SEGMENTS), _losses(_SEGMENTS, _loss))
for _name in ("dice", "tversky"):
    bundle(
        "losses",
        f"losses: {_name}, of whole batches",
        (_name,),
        _losses({_name: "mask"}, lambda name: getattr(keras.losses, name)),
    )


def _circle(names):
    tokens, h = _embedded()
    model = keras.Model(tokens, L.UnitNormalization()(L.Dense(4)(h)))
    [name] = names
    loss = getattr(keras.losses, name)
    compiled(model, keras.optimizers.SGD(0.01), loss() if name == "Circle" else loss)
    return trained(model, integers(ROWS, 4, below=30), integers(ROWS, below=4))


for _name in ("Circle", "circle"):
    bundle("losses", f"losses: {_name}, of other rows", (_name,), _circle)

METRICS = {
    "binary": (
        *("AUC", "BinaryAccuracy", "BinaryCrossentropy", "F1Score", "FBetaScore"),
        *("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives", "Precision"),
        *("Recall", "PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity"),
        *("SpecificityAtSensitivity", "BinaryIoU"),
        *("binary_accuracy", "binary_crossentropy", "binary_focal_crossentropy"),
    ),
    "one of four": (
        *("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "KLDivergence"),
        *("OneHotIoU", "OneHotMeanIoU", "TopKCategoricalAccuracy", "top_k_categorical_accuracy"),
        *("categorical_accuracy", "categorical_crossentropy", "categorical_focal_crossentropy"),
        *("categorical_hinge", "kl_divergence"),
    ),
    "index": (
        *("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"),
        *("SparseTopKCategoricalAccuracy", "sparse_categorical_accuracy"),
        *("sparse_categorical_crossentropy", "sparse_top_k_categorical_accuracy"),
    ),
    "numbers": (
        *("ConcordanceCorrelation", "CosineSimilarity", "LogCoshError", "MeanAbsoluteError"),
        *("MeanSquaredError", "PearsonCorrelation", "R2Score", "RootMeanSquaredError"),
        *("concordance_correlation", "huber", "log_cosh", "mean_absolute_error"),
        *("mean_squared_error", "pearson_correlation", "Metric", "MeanMetricWrapper"),
    ),
    "positive": (
        *("MeanAbsolutePercentageError", "MeanSquaredLogarithmicError", "Poisson", "poisson"),
        *("mean_absolute_percentage_error", "mean_squared_logarithmic_error"),
    ),
    "signs": ("Hinge", "SquaredHinge", "hinge", "squared_hinge"),
    "classes": ("Accuracy", "IoU", "MeanIoU"),
}
METRIC_OPTIONS = {
    "FBetaScore": {"beta": 0.5},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "OneHotIoU": {"num_classes": 4, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 4},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": 3},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
_METRICS = _kinds(METRICS)


@keras.saving.register_keras_serializable("matrix")
class Largest(keras.metrics.Metric):
    """Sums of a metric of one's own."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = keras.ops.max(keras.ops.abs(y_true - y_pred), axis=-1)
        self.total.assign_add(keras.ops.sum(rows))
        self.count.assign_add(keras.ops.cast(keras.ops.shape(rows)[0], "float32"))

    def result(self):
        return self.total / self.count


@keras.saving.register_keras_serializable("matrix")
def _fourth(y_true, y_pred):
    return keras.ops.mean((y_pred - y_true) ** 4, axis=-1)


def _metric(name):
    made = getattr(keras.metrics, name)
    if name == "Metric":
        return Largest()
    if name == "MeanMetricWrapper":
        return made(_fourth, name="fourth")
    return made(**METRIC_OPTIONS.get(name, {})) if isinstance(made, type) else made


def _metrics(names):
    kinds = {_METRICS[name] for name in names}
    heads = {f"of_{kind.split()[0]}": kind for kind in sorted(kinds)}
    model = _model(heads)
    metrics, weighted = {}, {}
    for head, kind in heads.items():
        of_kind = [name for name in names if _METRICS[name] == kind]
        metrics[head] = [_metric(name) for name in of_kind]
        weighted[head] = [
            _metric(name) for name in of_kind if isinstance(getattr(keras.metrics, name), type)
        ][:3]
    losses = {head: "mse" for head in heads}
    x, y = _data(heads)
    if "of_index" in heads:
        losses["of_index"] = "sparse_categorical_crossentropy"
    compiled(model, keras.optimizers.SGD(0.05), losses, metrics=metrics, weighted_metrics=weighted)
    weights = {head: numbers(ROWS, seed=3, low=0.0) for head in heads}
    return trained(model, x, y, sample_weight=weights)


_ALL = _present(keras.metrics, _METRICS)
bundle("metrics", "metrics", [name for name in _ALL if name[0].isupper()], _metrics)
bundle(
    "metrics",
    "metrics that are functions",
    [name for name in _ALL if name[0].islower()],
    _metrics,
)


@keras.saving.register_keras_serializable("matrix")
class Noting(L.Layer):
    """A layer with metrics of its own, which `fit` shows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean, self.sum = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="sum")

    def call(self, x):
        self.mean.update_state(x)
        self.sum.update_state(x)
        return x


def _in_layers(names):
    tokens, h = _embedded()
    model = keras.Model(tokens, L.Dense(3)(Noting()(L.Dense(4, "tanh")(h))))
    compiled(model, keras.optimizers.SGD(0.05), "mse")
    return trained(model, integers(ROWS, 4, below=30), numbers(ROWS, 3, seed=2))


bundle("metrics", "metrics of a layer", ("Mean", "Sum"), _in_layers)
