"""Models and tables for processes that serve them.

export          a SavedModel that needs nothing of this library
TableReader     rows of a table while it is trained elsewhere
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent import futures
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.arguments import shown
from keras_psplus.core import models
from keras_psplus.engine import Call
from keras_psplus.files import atomic
from keras_psplus.keras_internals.keras_parts import io_utils
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables.row_variable import is_keyed
from keras_psplus.tables.snapshot import Snapshot
from keras_psplus.tables.versions import TableReader

__all__ = ["TableReader", "export"]

# Export of a model to a SavedModel that needs nothing of this library: by a function, by
# `keras.Model.export` (`export_model`), which comes to the same for a model with dynamic tables,
# and by `keras.export.ExportArchive` (`export_archive`), for functions of the script's own.
#
# Dynamic tables are a hash table of row numbers and a variable of rows.

_LONG = tf.int64
_CHUNK = 1 << 18
_INT8 = "int8"


class FrozenTable(tf.Module):
    """Value of a `KeyedVariable` while a model is exported.

    Both parts are saved as variables are, and not as constants of a graph, of which TensorFlow
    takes 2 GiB.

    Args:
        spec: Of the table's `RowStore`.
        quantize: As for `export`.
    """

    def __init__(self, spec: dict[str, Any], snapshot: Snapshot, quantize: str | None) -> None:
        super().__init__()
        self._initial = initial_rows.maker_of_missing(spec)
        # The last row is that of all other keys.
        self._missing = len(snapshot.keys)
        rows = np.concatenate([snapshot.rows, np.zeros([1, spec["dim"]], np.float32)])
        stored, self.scales = tf.cast(rows, spec["rows_dtype"]), None
        if quantize == _INT8:
            stored, scales = quantized(rows)
            self.scales = tf.Variable(scales, trainable=False, name=f"{spec['name']}/scales")
        self.rows = tf.Variable(stored, trainable=False, name=f"{spec['name']}/rows")
        self.numbers = tf.lookup.experimental.MutableHashTable(_LONG, _LONG, self._missing)
        for first in range(0, self._missing, _CHUNK):
            keys = snapshot.keys[first : first + _CHUNK]
            self.numbers.insert(keys, np.arange(first, first + len(keys)))

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        numbers = self.numbers.lookup(keys)
        rows = tf.cast(tf.gather(self.rows, numbers), tf.float32)
        if self.scales is not None:
            rows *= tf.gather(self.scales, numbers)[:, tf.newaxis]
        if self._initial is None:
            return rows
        is_missing = tf.equal(numbers, self._missing)[:, tf.newaxis]
        return tf.where(is_missing, self._initial(keys), rows)


def quantized(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as int8, and the float32 scale of each: its largest number is 127."""
    words, scales = np.zeros(rows.shape, np.int8), np.abs(rows).max(1) / np.float32(127)
    with np.errstate(invalid="ignore"):  # A row with what is no number is served as such.
        for first in range(0, len(rows), _CHUNK):
            part = slice(first, first + _CHUNK)
            by = np.where(scales[part] > 0, scales[part], 1)[:, np.newaxis]
            words[part] = np.clip(np.rint(rows[part] / by), -127, 127)
    return words, scales


# Dynamic tables outside of an exported model, which is given the rows it needs.


class OutsideTable:
    """Value of a `KeyedVariable` while a model is exported that takes its rows.

    Args:
        spec: Of the table's `RowStore`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name, self._dim = spec["name"], spec["dim"]
        self._initial = initial_rows.maker_of_missing(spec)
        self._given: Sequence[tf.Tensor] | None = None
        self._asked: list[tf.Tensor] = []

    @property
    def signature(self) -> list[tf.TensorSpec]:
        """Specifications of keys and their rows, which the exported model takes."""
        name = re.sub(r"\W", "_", self.name)
        return [
            tf.TensorSpec([None], _LONG, name=f"{name}_keys"),
            tf.TensorSpec([None, self._dim], tf.float32, name=f"{name}_rows"),
        ]

    @contextlib.contextmanager
    def given(self, keys: tf.Tensor, rows: tf.Tensor) -> Iterator[None]:
        """Context in which lookups are among keys and rows, in any order."""
        order = tf.argsort(keys)
        # Behind them is what other keys have.
        self._given = tf.gather(keys, order), tf.pad(tf.gather(rows, order), [[0, 1], [0, 0]])
        try:
            yield
        finally:
            self._given = None

    @contextlib.contextmanager
    def asked(self) -> Iterator[list[tf.Tensor]]:
        """Context that returns the keys of its lookups, which get zeros."""
        self._asked = []
        yield self._asked

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        if self._given is None:
            self._asked.append(keys)
            return tf.zeros([tf.size(keys), self._dim])
        known, rows = self._given
        places = tf.searchsorted(known, keys)
        # Of those behind all others, any will do.
        there = tf.gather(tf.pad(known, [[0, 1]]), places)
        is_known = tf.logical_and(places < tf.size(known), tf.equal(there, keys))
        found = tf.gather(rows, tf.where(is_known, places, tf.size(known)))
        if self._initial is None:
            return found
        return tf.where(is_known[:, tf.newaxis], found, self._initial(keys))


def keys_of(asked: Sequence[tf.Tensor]) -> tf.Tensor:
    """Distinct keys of all lookups."""
    return tf.unique(tf.concat([tf.zeros([0], _LONG), *asked], 0)).y


_FORMAT = "tf_saved_model"


def export(
    model: keras.Model,
    folder: str | os.PathLike[str],
    signature: Sequence[Any] | None = None,
    outside: Collection[str] = (),
    quantize: str | None = None,
) -> None:
    """Writes a SavedModel that TensorFlow alone loads, with its dynamic tables.

    Tables of `layers.DynamicEmbedding` become a hash table of TensorFlow's and a variable, in the
    memory of the process that loads them; a key without a row is what the layer's `default` says.
    As of `model.export`, the SavedModel has the endpoint `serve`, which takes what the model does,
    and the signatures `"serve"` and `"serving_default"`; `keras.layers.TFSMLayer` loads it. The
    folder appears whole. Under a strategy the chief writes, and other workers return at once; call
    it when no step is under way.

    Args:
        model: A built model.
        folder: Path of the SavedModel.
        signature: List of `tf.TensorSpec`, one for each argument of the model's call, for a model
            that is neither functional nor sequential.
        outside: Names of tables, such as `"items/table"`, that are too large for one process and
            stay outside: behind its inputs, the exported model takes keys and their rows for each
            of them, in the model's order. Its endpoint and signature `keys` has the keys that
            inputs need.
        quantize: `"int8"` for rows of one byte a number and a float32 scale for each row, whose
            numbers are off by at most 1/254 of the largest in their row; None for rows as the
            table stores them.

    Raises:
        ValueError: If the model is not built, has no such table or none to quantize, or the
            signature is needed.

    Example:

    ```python
    keras_psplus.serving.export(model, "served/1")
    loaded = tf.saved_model.load("served/1")  # without keras_psplus
    print(loaded.serve(tf.constant([[17, 2**40]])))
    ```
    """
    inputs, names = _inputs_of(model, signature), _checked_outside(model, outside)
    _check_quantize(model, quantize, names)
    strategy = model.distribute_strategy
    engine = getattr(strategy, "engine", None)
    if engine is not None and not strategy.is_chief:
        return
    if engine is not None and hasattr(engine, "finish_steps"):
        engine.finish_steps()
    os.makedirs(os.path.dirname(os.path.realpath(folder)), exist_ok=True)

    def work() -> None:
        writing = atomic.written(folder)
        if engine is not None:
            writing = models.written(strategy, folder, makes_folders=True)
        with writing as path:
            _save(model, inputs, path, names, quantize)

    # A separate thread is outside of the strategy's scope even if the caller is inside.
    with futures.ThreadPoolExecutor(1) as executor:
        executor.submit(work).result()


def export_model(call: Call) -> Any:
    """Exports by `export` where Keras would not find the rows of dynamic tables.

    Raises:
        ValueError: If such a model is to have another format, or as `export`.
    """
    model, folder = call.owner, call.get("filepath")
    if not any(map(is_keyed, model.variables)):
        return call.engine.save(call)
    form = call.get("format", _FORMAT)
    if form != _FORMAT:
        raise ValueError(
            "The table of a DynamicEmbedding is a hash table and a variable once exported, which a "
            f'SavedModel has, and other formats do not: use format="{_FORMAT}". '
            f"Received: format={shown(form)} with model '{model.name}'"
        )
    signature = call.get("input_signature")
    export(model, folder, None if signature is None else tf.nest.map_structure(_spec_of, signature))
    if call.get("verbose") is not False:
        io_utils.print_msg(f"Saved artifact at '{os.fspath(folder)}'.")
    return None


def export_archive(call: Call) -> Any:
    """Writes an `ExportArchive`, whose functions are traced then.

    Raises:
        ValueError: If it has dynamic tables, or functions that were traced before.
    """
    tables = [one.path for one in call.owner.variables if is_keyed(one)]
    if tables:
        raise ValueError(
            "An ExportArchive knows no dynamic tables: `keras_psplus.serving.export` and "
            f"`model.export` write them. Received: the tables {', '.join(tables)}"
        )
    traced = [n for n in call.owner._endpoint_names if n not in call.owner._endpoint_signatures]
    if traced and getattr(call.engine, "exports_copies", False):
        models.refuse_traced(call, ", ".join(traced))
    return call.engine.save(call)


def _save(
    model: keras.Model, specs: list[Any], path: str, names: Collection[str], quantize: str | None
) -> None:
    module, outside = tf.Module(), list[OutsideTable]()

    def copied(variable: keras.Variable) -> Any:
        value: Any = variable._value
        if not is_keyed(variable):
            return models.copied(variable)
        if variable.path not in names:
            return FrozenTable(value.spec, value.read_snapshot(), quantize)
        outside.append(OutsideTable(value.spec))
        return outside[-1]

    with models.with_copies(model, copied) as values:
        module.values = [value for value in values if not isinstance(value, OutsideTable)]
        module.resources = _resources_of(model)
        rows = [spec for table in outside for spec in table.signature]

        @tf.function(input_signature=[*specs, *rows], autograph=False)
        def serve(*args: Any) -> Any:
            given = args[len(specs) :]
            with contextlib.ExitStack() as tables:
                for i, table in enumerate(outside):
                    tables.enter_context(table.given(*given[2 * i : 2 * i + 2]))
                return model(*args[: len(specs)], training=False)

        @tf.function(input_signature=specs, autograph=False)
        def keys(*args: Any) -> dict[str, tf.Tensor]:
            with contextlib.ExitStack() as tables:
                asked = {table.name: tables.enter_context(table.asked()) for table in outside}
                model(*args, training=False)
            return {name: keys_of(every) for name, every in asked.items()}

        module.serve = serve
        serve.get_concrete_function()
        signatures = {"serve": serve, tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: serve}
        if outside:
            module.keys = signatures["keys"] = keys
            keys.get_concrete_function()
        is_dense = all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(specs))
        # TensorFlow Serving is sent tensors alone.
        tf.saved_model.save(module, path, signatures=signatures if is_dense else None)


def _checked_outside(model: keras.Model, outside: Collection[str]) -> frozenset[str]:
    known = [variable.path for variable in model.variables if is_keyed(variable)]
    if isinstance(outside, str) or not set(outside) <= set(known):
        raise ValueError(
            "`outside` lists dynamic tables of the model, by the names of their variables, of "
            f"which there are {known}. Received: outside={shown(outside)}"
        )
    return frozenset(outside)


def _check_quantize(model: keras.Model, quantize: Any, outside: Collection[str]) -> None:
    inside = [v.path for v in model.variables if is_keyed(v) and v.path not in outside]
    if quantize is not None and (quantize != _INT8 or not inside):
        raise ValueError(
            '`quantize` must be "int8", for the rows of the dynamic tables that are exported with '
            f"the model, or None. Received: quantize={shown(quantize)} with the tables {inside}"
        )


def _inputs_of(model: keras.Model, signature: Sequence[Any] | None) -> list[Any]:
    """Specifications of the tensors of each argument of the model's call."""
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' has no weights yet. Train it, or call it on a batch, before "
            "it is exported. Received: a model that is not built"
        )
    if signature is not None:
        return list(signature)
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"The model '{model.name}' is neither functional nor sequential, and does not say what "
            'it takes. Give it: `signature=[tf.TensorSpec([None, 5], "int64")]`. '
            f"Received: {type(model).__name__} with signature=None"
        )
    return [tf.nest.map_structure(_spec_of, model.input)]


def _spec_of(one: Any) -> Any:
    """Specification of a tensor: a `KerasTensor`, an `InputSpec`, or one of TensorFlow's."""
    if isinstance(one, tf.TypeSpec):
        return one
    if getattr(one, "ragged", False):
        return tf.RaggedTensorSpec(one.shape, one.dtype, ragged_rank=one.ragged_rank or 1)
    if getattr(one, "sparse", False):
        return tf.SparseTensorSpec(one.shape, one.dtype)
    return tf.TensorSpec(one.shape, one.dtype, name=one.name)


def _resources_of(model: keras.Model) -> list[Any]:
    """Lookup tables of layers such as `StringLookup`."""
    kind = tf.saved_model.experimental.TrackableResource
    return [
        value
        for layer in model._flatten_layers()
        for value in vars(layer).values()
        if isinstance(value, kind)
    ]
