"""Models and tables for processes that serve them.

export          a SavedModel that needs nothing of this library
PublishTables   versions of the tables, and of the whole model, while it is trained
TableReader     what reads them, in processes that serve
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.arguments import shown, whole_number
from keras_psplus.core import models
from keras_psplus.core.graph.subgraph import with_inputs
from keras_psplus.engine import Call
from keras_psplus.files import atomic, ownership
from keras_psplus.keras_internals.keras_parts import io_utils
from keras_psplus.log import logger
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables import versions
from keras_psplus.tables.local import outside as outside_of_scope
from keras_psplus.tables.reader import PublishedModel, TableReader
from keras_psplus.tables.row_variable import is_keyed
from keras_psplus.tables.snapshot import Snapshot

__all__ = ["PublishTables", "PublishedModel", "TableReader", "export"]

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
    """Rows as int8, each with the scale by which its largest is 127."""
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
        self._asked: list[tuple[tf.Tensor, tf.Tensor]] = []

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
    def asked(self) -> Iterator[list[tuple[tf.Tensor, tf.Tensor]]]:
        """Context that returns the keys of its lookups, and the zeros that these get."""
        self._asked = []
        yield self._asked

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        if self._given is None:
            self._asked.append((keys, tf.zeros([tf.size(keys), self._dim])))
            return self._asked[-1][1]
        known, rows = self._given
        places = tf.searchsorted(known, keys)
        # Of those behind all others, any will do.
        there = tf.gather(tf.pad(known, [[0, 1]]), places)
        is_known = tf.logical_and(places < tf.size(known), tf.equal(there, keys))
        found = tf.gather(rows, tf.where(is_known, places, tf.size(known)))
        if self._initial is None:
            return found
        return tf.where(is_known[:, tf.newaxis], found, self._initial(keys))


def keys_of(asked: dict[str, list[tuple[tf.Tensor, tf.Tensor]]]) -> dict[str, tf.Tensor]:
    """Distinct keys of all lookups, by tables."""
    needed = with_inputs([keys.op for every in asked.values() for keys, _ in every])
    for name, every in asked.items():
        if any(rows.op in needed for _, rows in every):
            raise ValueError(
                "Ids are computed from rows of a table that is outside of the model: nobody knows "
                "beforehand which rows an input needs. Keep that table inside, or publish tables "
                f"alone, with `model=False`. Received: ids from rows of '{name}'"
            )
    none = tf.zeros([0], _LONG)
    return {
        name: tf.unique(tf.concat([none, *(keys for keys, _ in every)], 0)).y
        for name, every in asked.items()
    }


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
    _finish_steps(model)
    os.makedirs(os.path.dirname(os.path.realpath(folder)), exist_ok=True)

    def work() -> None:
        writing = atomic.written(folder)
        if engine is not None:
            writing = models.written(strategy, folder, makes_folders=True)
        with writing as path:
            _save(model, inputs, path, names, quantize=quantize)

    outside_of_scope(work)


def _finish_steps(model: keras.Model) -> None:
    engine = getattr(model.distribute_strategy, "engine", None)
    if engine is not None and hasattr(engine, "finish_steps"):
        engine.finish_steps()


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
    model: keras.Model,
    specs: list[Any],
    path: str,
    names: Collection[str],
    given: Sequence[keras.Variable] = (),
    quantize: str | None = None,
) -> None:
    """Saves a model, of which callers give some tables and weights behind the inputs."""
    module, kept, outside = tf.Module(), list[Any](), list[OutsideTable]()
    are_given, count = {id(variable) for variable in given}, len(specs) + len(given)

    def copied(variable: keras.Variable) -> Any:
        value: Any = variable._value
        if id(variable) in are_given:
            return value
        if is_keyed(variable) and variable.path in names:
            outside.append(OutsideTable(value.spec))
            return outside[-1]
        if is_keyed(variable):
            kept.append(FrozenTable(value.spec, value.read_snapshot(), quantize))
        else:
            kept.append(models.copied(variable))
        return kept[-1]

    def call(args: Sequence[Any]) -> Any:
        for variable, value in zip(given, args[len(specs) : count]):
            variable._value = value
        return model(*args[: len(specs)], training=False)

    with _refusing_state(model), models.with_copies(model, copied):
        module.values, module.resources = kept, _resources_of(model)
        rows = [spec for table in outside for spec in table.signature]
        taken = [*specs, *(tf.TensorSpec(one.shape, one.dtype) for one in given)]

        @tf.function(input_signature=[*taken, *rows], autograph=False)
        def serve(*args: Any) -> Any:
            with contextlib.ExitStack() as tables:
                for i, table in enumerate(outside):
                    tables.enter_context(table.given(*args[count + 2 * i : count + 2 * i + 2]))
                return call(args)

        @tf.function(input_signature=taken, autograph=False)
        def keys(*args: Any) -> dict[str, tf.Tensor]:
            with contextlib.ExitStack() as tables:
                asked = {table.name: tables.enter_context(table.asked()) for table in outside}
                call(args)
            return keys_of(asked)

        module.serve = serve
        serve.get_concrete_function()
        signatures = {"serve": serve, tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: serve}
        if outside:
            module.keys = signatures["keys"] = keys
            keys.get_concrete_function()
        is_dense = all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(specs))
        # TensorFlow Serving is sent tensors alone.
        has_signatures = is_dense and not given
        tf.saved_model.save(module, path, signatures=signatures if has_signatures else None)


@contextlib.contextmanager
def _refusing_state(model: keras.Model) -> Iterator[None]:
    """Context that refuses a model whose calls set a variable, by name."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        # Of a weight that is given, which is a tensor; of a variable that the model does not list.
        if "has no attribute 'assign" not in str(error) and "reachable from root" not in str(error):
            raise
        raise ValueError(
            f"The model '{model.name}' keeps state between its calls, as stateful layers do, which "
            "neither a published nor an exported model has. Make these layers stateless, or "
            "publish the tables alone, with `model=False`. "
            f"Received: {type(error).__name__}: {str(error)[:200]}"
        ) from None


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


# Publication of dynamic tables, and of the model around them, while they are trained.

_EPOCH = "epoch"


class PublishTables(keras.callbacks.Callback):
    """Writes versions of a model's dynamic tables, which `serving.TableReader` follows.

    A version is of all tables and, with `model=True`, of all other weights. The first one has all
    rows, the ones after it those that steps have changed since, and the keys that have expired; now
    and then all rows are written again. Other weights are written whole each time, and the layers
    once for each `fit`. A reader finds a version once all of it is on the disk: a kill at any
    moment leaves the last one. Where a version cannot be written, as the disk is full, a warning
    says so, once, and training goes on; the next one has what is missing. With servers, the chief
    writes what they send it; training waits in the meantime.

    Args:
        folder: Path of a folder for the tables of this model alone.
        every: Steps between two versions, or `"epoch"`. The end of training publishes the rest.
        model: Whether versions have the whole model, for `TableReader.model`.
        signature: As that of `serving.export`, for a model that is neither functional nor
            sequential.

    Raises:
        ValueError: If `every` is neither, the model has no dynamic table, the folder has others, or
            the model cannot be exported.
        OSError: As training begins, if the folder cannot be written, or another job writes to it.

    Example:

    ```python
    publish = keras_psplus.serving.PublishTables("published", every=100, model=True)
    model.fit(dataset, epochs=3, callbacks=[publish])
    ```
    """

    # Workers that are not the chief need none.
    _writes_only = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | str = _EPOCH,
        model: bool = False,
        signature: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(every, str) and every != _EPOCH:
            raise ValueError(
                f'`every` must be an int from 1 up, or "epoch". Received: every={shown(every)}'
            )
        if not isinstance(model, bool) or (signature is not None and not model):
            raise ValueError(
                "`model` must be True, with which a `signature` may be given, or False. "
                f"Received: model={shown(model)}, signature={shown(signature)}"
            )
        # None at epochs' ends.
        self._every = None if every == _EPOCH else whole_number("every", every, 1)
        self.folder = os.fspath(folder)
        self._has_model, self._signature = model, signature
        self._writer: versions.VersionWriter | None = None
        self._tables: list[keras.Variable] = []
        self._weights: list[keras.Variable] = []
        self._marks: list[Any] = []
        self._steps, self._last_batch = 0, -1
        self._publishes = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._has_model and self.model.built:
            _inputs_of(self.model, self._signature)
        if self._writer is not None:
            # Layers such as StringLookup may have been adapted since.
            self._writer.model = None
        self._take()
        versions.read(self.folder)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # One call may be for several steps.
        self._steps += batch - self._last_batch if batch > self._last_batch else batch + 1
        self._last_batch = batch
        if self._every is not None and self._steps >= self._every:
            self._publish()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._every is None:
            self._publish()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._steps:
            self._publish()
        ownership.release(self.folder)

    def _publish(self) -> None:
        try:
            self.publish()
        except OSError as error:
            if self._publishes:
                logger.warning("training goes on and publishes nothing for now: %s", error)
            self._publishes = False
        else:
            self._publishes = True

    def _take(self) -> None:
        with versions.translated(self.folder):
            ownership.claim(self.folder, "PublishTables", "folder")

    def publish(self) -> None:
        """Writes a version now.

        Raises:
            OSError: If it cannot be written, or another job publishes to the folder.
        """
        self._steps = 0
        self._take()
        _finish_steps(self.model)
        tables = [one for one in self.model.variables if is_keyed(one)]
        weights = [one for one in self.model.weights if self._has_model and not is_keyed(one)]
        is_same = [*map(id, tables), *map(id, weights)] == [
            *map(id, self._tables),
            *map(id, self._weights),
        ]
        if self._writer is None or not is_same:
            self._begin(tables, weights)
        assert self._writer is not None
        marks = [None] * len(tables) if self._writer.needs_whole else self._marks
        changes = [v._value.read_changes(mark) for v, mark in zip(tables, marks)]
        if any(one.is_whole for one in changes):
            changes = [
                one if one.is_whole else variable._value.read_changes(None)
                for variable, one in zip(tables, changes)
            ]
        if weights or any(one.is_whole or len(one.keys) or len(one.gone) for one in changes):
            iterations = getattr(self.model.optimizer, "iterations", None)
            step = 0 if iterations is None else int(iterations.numpy())
            self._writer.write(changes, step, [one._value.numpy() for one in weights])
        self._marks = [one.mark for one in changes]

    def _begin(self, tables: list[keras.Variable], weights: list[keras.Variable]) -> None:
        if not tables:
            raise ValueError(
                "PublishTables publishes the tables of keras_psplus.layers.DynamicEmbedding, of "
                f"which the model has none. Received: model '{self.model.name}'"
            )
        specs = {variable.path: variable._value.spec for variable in tables}
        save = self._save if self._has_model else None
        self._writer = versions.VersionWriter(self.folder, specs, save)
        self._tables, self._weights = tables, weights

    def _save(self, path: str) -> None:
        """Writes the model without its tables and weights."""
        model, names = self.model, [one.path for one in self._tables]
        inputs = _inputs_of(model, self._signature)
        outside_of_scope(lambda: _save(model, inputs, path, names, self._weights))
