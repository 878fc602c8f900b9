"""Training state in a backup, beside weights and seeds.

The position in the data, metrics, and callbacks' states.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.backup.store import TRAINING
from keras_psplus.core.base import optimizers
from keras_psplus.core.base.optimizers import optimizers_of, other_variables, steps_of
from keras_psplus.core.worker_state import typed
from keras_psplus.files.integrity import open_file
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.tables.row_variable import is_keyed, parts_of, rows_with_keys

# State of callbacks in a backup, restored when a job resumes.
#
# Keras's callbacks have no method for it and reset themselves in `on_train_begin`, so their
# attributes are saved here. A script's callbacks are saved by `state_dict()` and restored by
# `load_state_dict(state)`, as in PyTorch Lightning.


# Attributes of Keras's callbacks that change while a model trains.
ATTRIBUTES: list[tuple[Any, str]] = [
    (keras_callbacks.EarlyStopping, "wait stopped_epoch best best_epoch"),
    (keras_callbacks.ReduceLROnPlateau, "best cooldown_counter wait"),
    (keras_callbacks.ModelCheckpoint, "best _batches_seen_since_last_saving _last_batch_seen"),
    (keras_callbacks.BackupAndRestore, "_batches_seen_since_last_saving _last_batch_seen"),
    (keras_callbacks.History, "epoch history"),
    (keras_callbacks.TensorBoard, "_global_train_batch _global_test_batch"),
]
_WEIGHTS, _OWN, _FILE = "best_weights", "state_dict", "file_bytes"


def states_of(
    callbacks: Sequence[keras.callbacks.Callback],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Collects the state of callbacks.

    Returns:
        Dict from callbacks' names to what can be turned into JSON, and a dict from names to arrays.

    Raises:
        ValueError: If a `state_dict` returns what cannot be.
    """
    states: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, callback in _named(callbacks):
        state = {a: getattr(callback, a) for a in _attributes(callback) if hasattr(callback, a)}
        if isinstance(callback, keras_callbacks.EarlyStopping):
            weights = callback.best_weights
            state[_WEIGHTS] = None if weights is None else len(weights)
            for i, array in enumerate(weights or ()):
                arrays |= {f"{name}/{i}{what}": part for what, part in parts_of(array).items()}
        if isinstance(callback, keras_callbacks.CSVLogger) and callback.csv_file is not None:
            callback.csv_file.flush()
            state["keys"], state[_FILE] = callback.keys, _size(callback.filename)
        if _has_own(callback):
            state[_OWN] = callback.state_dict()
        if state:
            states[name] = _checked(name, state)
    return states, arrays


def restore(
    callbacks: Sequence[keras.callbacks.Callback],
    states: dict[str, Any],
    weights: dict[str, list[np.ndarray]],
) -> None:
    """Gives callbacks what they kept; after their `on_train_begin`.

    Args:
        callbacks: The callbacks of a `fit`; those that were not there before stay as they are.
        states: As `states_of` returns it.
        weights: For each callback with weights, a list of them.
    """
    for name, callback in _named(callbacks):
        state = states.get(name)
        if state is None:
            continue
        for attribute in _attributes(callback):
            if attribute in state:
                # Another epoch may be written to lists and dicts, and this be restored again.
                setattr(callback, attribute, json.loads(json.dumps(state[attribute])))
        if isinstance(callback, keras_callbacks.EarlyStopping):
            callback.best_weights = weights.get(name)
        if isinstance(callback, keras_callbacks.CSVLogger) and _FILE in state:
            _cut_file(callback, state)
        if _OWN in state and _has_own(callback):
            callback.load_state_dict(state[_OWN])


def counts_of_weights(states: dict[str, Any]) -> dict[str, int]:
    """For each callback that keeps weights, how many arrays they are."""
    return {name: state[_WEIGHTS] for name, state in states.items() if state.get(_WEIGHTS)}


def keep_files(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Opens log files, which callbacks would begin again, to go on in them.

    Args:
        callbacks: The callbacks of a `fit`, before their `on_train_begin`.

    Returns:
        List of those for which that is so: their `append` is to be put back.
    """
    changed = [c for c in callbacks if isinstance(c, keras_callbacks.CSVLogger) and not c.append]
    for callback in changed:
        callback.append = True
    return changed


def _named(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    # By number within the class: workers that are not the chief lack those that write.
    counts: dict[str, int] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = counts[kind] = counts.get(kind, -1) + 1
        yield f"{kind}/{number}", callback


def _attributes(callback: keras.callbacks.Callback) -> list[str]:
    return [a for kind, names in ATTRIBUTES if isinstance(callback, kind) for a in names.split()]


def _has_own(callback: keras.callbacks.Callback) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(
        getattr(callback, "load_state_dict", None)
    )


def _checked(name: str, state: dict[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(state, default=_plain))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"What the callback {name} keeps cannot be backed up: `state_dict` has to return what "
            f"can be turned into JSON. Received: {error}"
        ) from None


def _plain(value: object) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, tf.Tensor):
        return value.numpy().tolist()
    raise TypeError(f"{type(value).__name__} ({value!r})")


def _size(path: str) -> int:
    return tf.io.gfile.stat(path).length if file_utils.exists(path) else 0


def _cut_file(callback: keras.callbacks.CSVLogger, state: dict[str, Any]) -> None:
    """Removes the rows of epochs that are trained again."""
    size = _size(callback.filename)
    if size > state[_FILE] and not file_utils.is_remote_path(callback.filename):
        callback.csv_file.flush()
        os.truncate(callback.filename, state[_FILE])
        size = state[_FILE]
    callback.keys, callback.append_header = state["keys"], size == 0


_FACTS, _OTHERS = "facts", "others"


class TrainingState:
    """The state of a `fit`, as arrays and as what can be turned into JSON."""

    def __init__(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.facts, self.arrays = facts, arrays

    @classmethod
    def of(
        cls,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        position: dict[str, Any],
        has_value: Callable[[Any], bool] = lambda variable: True,
    ) -> TrainingState:
        """The present one.

        Args:
            position: Dict that says where in the data it is.
            has_value: Function of a variable that tells whether its value belongs to the state.
        """
        states, arrays = states_of(callbacks)
        for i, variable in enumerate(model.metrics_variables):
            arrays[f"metrics/{i}"] = variable.numpy()
        others = other_variables(model)
        for name, variable in others.items():
            if has_value(variable):
                arrays[f"{_OTHERS}/{name}"] = variable.numpy()
        facts = {
            **position,
            "callbacks": states,
            "variables": optimizers.forms(model.variables),
            "optimizers": optimizers.describe(model),
            "steps": steps_of(model),
            _OTHERS: dict(zip(others, optimizers.forms(others.values()))),
        }
        return cls(facts, arrays)

    @classmethod
    def read(cls, folder: str) -> TrainingState:
        with open_file(file_utils.join(folder, TRAINING)) as file:
            content = io.BytesIO(file.read())
        with np.load(content) as found:
            arrays = {name: found[name] for name in found.files}
        return cls(json.loads(arrays.pop(_FACTS).tobytes()), arrays)

    def write(self, folder: str) -> None:
        facts = np.frombuffer(json.dumps(self.facts).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, **{_FACTS: facts}, **self.arrays)  # type: ignore[arg-type]
        with tf.io.gfile.GFile(file_utils.join(folder, TRAINING), "wb") as file:
            file.write(content.getvalue())

    def assign_metrics(self, model: keras.Model) -> None:
        for i, variable in enumerate(model.metrics_variables):
            value = self.arrays.get(f"metrics/{i}")
            if value is not None and value.shape == tuple(variable.shape):
                variable.assign(value)

    def assign_others(self, model: keras.Model) -> None:
        """Gives the variables that Keras does not save with a model what they had."""
        for name, variable in other_variables(model).items():
            value = self.arrays.get(f"{_OTHERS}/{name}")
            if value is not None and value.shape == tuple(variable.shape):
                variable.assign(typed(value, tf.as_dtype(variable.dtype)))

    def weights_of_callback(self, name: str, count: int, model: keras.Model) -> list[np.ndarray]:
        """The arrays that a callback has kept of a model's weights."""
        found = []
        for i, variable in zip(range(count), model.weights):
            array = typed(self.arrays[f"{name}/{i}"], tf.as_dtype(variable.dtype))
            found.append(rows_with_keys(array, self.arrays, f"{name}/{i}"))
        return found


def build_optimizers(
    strategy: tf.distribute.Strategy, model: keras.Model, facts: dict[str, Any]
) -> None:
    """Builds those optimizers of a model that were built when a state was saved."""
    optimizers.build(strategy, model, facts["optimizers"])


def check_model(
    model: keras.Model, facts: dict[str, Any], folder: str, with_optimizers: bool = True
) -> None:
    """Sees that a state is one of a model, whose optimizers have been built."""
    saved, own = facts["variables"], optimizers.forms(model.variables)
    differing: Any = None
    if saved != own:
        differing = optimizers.first_difference(own, saved)
    elif with_optimizers:
        differing = difference_beside_weights(model, facts)
    if differing is not None:
        raise ValueError(
            "The backup is one of another model, or of one that was compiled otherwise. Give this "
            f"job its own `backup_dir`, or delete {folder}. "
            f"Received: {differing[0]} in the model, {differing[1]} in the backup"
        )


def difference_beside_weights(model: keras.Model, facts: dict[str, Any]) -> Any:
    """Finds what differs between a model's optimizers and other variables and those of a state.

    Returns:
        Pair of what the model and the state have, or None if they are the same.
    """
    differing = optimizers.difference(model, facts["optimizers"])
    return differing or _different_others(model, facts[_OTHERS])


def _different_others(model: keras.Model, saved: dict[str, Any]) -> tuple[str, Any] | None:
    others = other_variables(model)
    own = dict(zip(others, optimizers.forms(others.values())))
    for name in sorted({*own, *saved}):
        if own.get(name) != saved.get(name):
            return f"{own.get(name)} for {name}", saved.get(name)
    return None


# State of a `fit` that was read from a backup, on each worker.


class Resumed:
    """State of a `fit` between its reading and the first resumed step.

    Args:
        model: The model, with its weights of then.
        facts: Facts of a `TrainingState`.
        weights: For each callback that keeps weights, a list of them.
    """

    def __init__(
        self, model: keras.Model, facts: dict[str, Any], weights: dict[str, list[np.ndarray]]
    ) -> None:
        self.facts, self.weights = facts, weights
        self._metrics = [variable.numpy() for variable in model.metrics_variables]
        self._rates = [rate.numpy() for rate in _rates(model)]

    def assign(self, model: keras.Model) -> None:
        """Assigns what Keras has reset and callbacks may have changed as an epoch began."""
        for variable, value in zip(model.metrics_variables, self._metrics):
            variable.assign(value)
        for variable, value in zip(_rates(model), self._rates):
            variable.assign(value)


def weights_of_callbacks(
    model: keras.Model,
    facts: dict[str, Any],
    state: TrainingState | None,
    share: Callable[[list[keras.Variable]], None],
    meet: Callable[[], Any],
) -> dict[str, list[np.ndarray]]:
    """Gives all workers the weights that callbacks of the chief's backup kept.

    They travel as the model's own, which all but the chief have to be given after that.

    Args:
        share: Function that gives all workers the chief's values of Keras variables.

    """
    found = {}
    counts = counts_of_weights(facts["callbacks"])
    # Rows of dynamic tables stay where they are: the chief's are those that count.
    weights = [weight for weight in model.weights if not is_keyed(weight)]
    own = [weight.numpy() for weight in weights] if state is not None and counts else []
    for name, count in counts.items():
        kept = [] if state is None else state.weights_of_callback(name, count, model)
        for weight, value in zip(model.weights, kept):
            if not is_keyed(weight):
                weight.assign(value)
        # Of variables in shares, the chief has given the others their parts.
        meet()
        share(weights)
        of_model = enumerate(model.weights)
        found[name] = [kept[i] if is_keyed(w) and kept else w.numpy() for i, w in of_model]
        meet()
    for weight, value in zip(weights, own):
        weight.assign(value)
    return found


def _rates(model: keras.Model) -> list[keras.Variable]:
    rates = [optimizer._learning_rate for optimizer in optimizers_of(model).values()]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]
