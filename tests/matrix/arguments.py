"""Recipes of the arguments of `compile`, `fit`, `evaluate` and `predict`, and of callbacks."""

import csv
import pathlib
import tempfile

import keras
import numpy as np

from tests.matrix.training import BATCH, bundle, compiled, integers, numbers, trained

L = keras.layers
ROWS = 41


def _model():
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            L.Embedding(30, 4, name="table"),
            L.Flatten(),
            L.Dense(8, "tanh"),
            L.Dense(4, "softmax"),
        ]
    )


def _data(rows=ROWS):
    return integers(rows, 4, below=30), integers(rows, below=4, seed=1)


COMPILE = {
    "loss": {"loss": "sparse_categorical_crossentropy"},
    "optimizer": {"optimizer": "sgd"},
    "metrics": {"metrics": ["accuracy"]},
    "weighted_metrics": {"weighted_metrics": ["accuracy"]},
    "loss_weights": {"loss_weights": 0.5},
    "auto_scale_loss": {"auto_scale_loss": False},
}


def _compiled_by(some):
    def run(names):
        options = {}
        for name in names:
            options |= some[name]
        model = _model()
        loss = options.pop("loss", "sparse_categorical_crossentropy")
        compiled(model, options.pop("optimizer", keras.optimizers.SGD(0.05)), loss, **options)
        weights = numbers(ROWS, low=0.5, high=2.0)
        return trained(model, *_data(), sample_weight=weights)

    return run


bundle("compile", "compile", COMPILE, _compiled_by(COMPILE))
# Arguments that change how steps are made.
for _name, _value in {"run_eagerly": True, "steps_per_execution": 3, "jit_compile": True}.items():
    bundle("compile", f"compile: {_name}", (_name,), _compiled_by({_name: {_name: _value}}))
FIT = {
    "x": {},
    "y": {},
    "batch_size": {"batch_size": 7},
    "epochs": {"epochs": 3},
    "verbose": {"verbose": 2},
    "callbacks": {"callbacks": [keras.callbacks.History()]},
    "validation_split": {"validation_split": 0.3},
    "shuffle": {"shuffle": False},
    "class_weight": {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5}},
    "initial_epoch": {"initial_epoch": 1},
    "validation_batch_size": {"validation_batch_size": 5},
    "validation_freq": {"validation_freq": 2},
}
OTHER_FIT = {
    "sample_weight": {"sample_weight": lambda: numbers(ROWS, low=0.0)},
    "validation_data": {"validation_data": lambda: _data(9)},
    "steps_per_epoch": {"steps_per_epoch": lambda: 3},
    "validation_steps": {"validation_steps": lambda: 1},
    "validation_batch_size": {"validation_batch_size": lambda: 6},
}


def _fitted_by(some):
    def run(names):
        options = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
        for name in names:
            options |= {key: one() if callable(one) else one for key, one in some[name].items()}
        if "validation_steps" in options:
            options |= {"validation_data": _data(9)}
        model = _model()
        loss = "sparse_categorical_crossentropy"
        compiled(model, keras.optimizers.SGD(0.05), loss, weighted_metrics=["accuracy"])
        history = model.fit(*_data(), **options).history
        return model, {f"history/{name}": np.asarray(value) for name, value in history.items()}

    return run


bundle("fit", "fit", FIT, _fitted_by(FIT))
bundle("fit", "fit with other arguments", OTHER_FIT, _fitted_by(OTHER_FIT))


def _evaluated(names):
    model = _model()
    compiled(model, "sgd", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    x, y = _data()
    seen = []
    noting = keras.callbacks.LambdaCallback()
    noting.on_test_batch_end = lambda batch, logs=None: seen.append(float(logs["loss"]))
    options = {
        "x": {"x": x},
        "y": {"y": y},
        "batch_size": {"batch_size": 7},
        "verbose": {"verbose": 2},
        "sample_weight": {"sample_weight": numbers(ROWS, low=0.0)},
        "steps": {"steps": 3},
        "callbacks": {"callbacks": [noting]},
        "return_dict": {"return_dict": True},
    }
    given = {"x": x, "y": y, "verbose": 0}
    for name in names:
        given |= options[name]
    logs = model.evaluate(**given)
    values = logs.values() if isinstance(logs, dict) else logs
    return model, {"evaluated": np.asarray(list(values)), "steps": np.asarray(len(seen))}


bundle(
    "evaluate",
    "evaluate",
    ("x", "y", "batch_size", "verbose", "sample_weight", "steps", "callbacks", "return_dict"),
    _evaluated,
)


def _predicted(names):
    model = _model()
    x, _ = _data()
    seen = []
    noting = keras.callbacks.LambdaCallback()
    noting.on_predict_batch_end = lambda batch, logs=None: seen.append(batch)
    options = {
        "x": {"x": x},
        "batch_size": {"batch_size": 7},
        "verbose": {"verbose": 2},
        "steps": {"steps": 3},
        "callbacks": {"callbacks": [noting]},
    }
    given = {"x": x, "verbose": 0}
    for name in names:
        given |= options[name]
    compiled(model, "sgd", "mse")
    predicted = model.predict(**given)
    return model, {"predicted": predicted, "batches": np.asarray(seen)}


bundle("predict", "predict", ("x", "batch_size", "verbose", "steps", "callbacks"), _predicted)


class Noting(keras.callbacks.Callback):
    """Every call that a callback has, and the logs that it is given."""

    def __init__(self):
        super().__init__()
        self.calls, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(batch)
        self.losses.append(float(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(100 + epoch)
        self.losses.append(float(logs["val_loss"]))


def _with_callbacks(names):
    with tempfile.TemporaryDirectory() as text:
        folder = pathlib.Path(text)
        C, noting = keras.callbacks, Noting()
        rates = []
        callbacks = {
            "BackupAndRestore": lambda: C.BackupAndRestore(folder / "backup"),
            "CSVLogger": lambda: C.CSVLogger(folder / "log.csv"),
            "Callback": lambda: noting,
            "CallbackList": lambda: C.History(),
            "EarlyStopping": lambda: C.EarlyStopping(
                "val_loss", min_delta=1.0, patience=3, restore_best_weights=True
            ),
            "History": lambda: C.History(),
            "LambdaCallback": lambda: C.LambdaCallback(
                on_epoch_end=lambda epoch, logs: rates.append(logs["val_loss"])
            ),
            "LearningRateScheduler": lambda: C.LearningRateScheduler(
                lambda epoch, rate: 0.8 * rate
            ),
            "ModelCheckpoint": lambda: C.ModelCheckpoint(
                folder / "best.weights.h5", "val_loss", save_best_only=True, save_weights_only=True
            ),
            "ProgbarLogger": lambda: C.ProgbarLogger(),
            "ReduceLROnPlateau": lambda: C.ReduceLROnPlateau("val_loss", 0.5, 1, min_delta=1.0),
            "RemoteMonitor": lambda: Quiet(),
            "SwapEMAWeights": lambda: C.SwapEMAWeights(swap_on_epoch=True),
            "TensorBoard": lambda: C.TensorBoard(folder / "board", write_graph=False),
            "TerminateOnNaN": lambda: C.TerminateOnNaN(),
        }
        model = _model()
        averaged = "SwapEMAWeights" in names
        optimizer = keras.optimizers.SGD(0.2, use_ema=averaged, ema_momentum=0.8)
        compiled(model, optimizer, "sparse_categorical_crossentropy")
        made = [callbacks[name]() for name in names]
        if "CallbackList" in names:
            made = C.CallbackList(made, model=model, epochs=5, steps=6, verbose=0, add_history=True)
        options = {"validation_data": _data(9), "batch_size": BATCH, "shuffle": False}
        history = model.fit(*_data(), epochs=5, callbacks=made, verbose=0, **options).history
        found = {f"history/{name}": np.asarray(value) for name, value in history.items()}
        found |= {"calls": np.asarray(noting.calls), "losses": np.asarray(noting.losses)}
        found["rates"] = np.asarray(rates)
        # One worker writes files.
        log, best = folder / "log.csv", folder / "best.weights.h5"
        rows = list(csv.DictReader(log.open())) if log.exists() else []
        found["own csv"] = np.asarray([float(row["val_loss"]) for row in rows])
        found["own files"] = np.asarray([best.exists(), any((folder / "board").rglob("events.*"))])
        return model, found


class Quiet(keras.callbacks.RemoteMonitor):
    """Sends nothing, but takes what it would send."""

    def on_epoch_end(self, epoch, logs=None):
        self.sent = {name: float(value) for name, value in (logs or {}).items()}


bundle(
    "callbacks",
    "callbacks",
    (
        *("BackupAndRestore", "CSVLogger", "Callback", "EarlyStopping", "History"),
        *("LambdaCallback", "LearningRateScheduler", "ModelCheckpoint", "ProgbarLogger"),
        *("ReduceLROnPlateau", "RemoteMonitor", "TensorBoard", "TerminateOnNaN"),
    ),
    _with_callbacks,
)
bundle("callbacks", "callbacks: SwapEMAWeights", ("SwapEMAWeights",), _with_callbacks)
bundle("callbacks", "callbacks: CallbackList", ("CallbackList",), _with_callbacks)
