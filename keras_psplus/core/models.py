"""Models' variables, made before the first step, and files, which appear whole."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import keras
import tensorflow as tf

from keras_psplus import log
from keras_psplus.core.base.optimizers import optimizers_of, unwrapped
from keras_psplus.core.base.threads import ThreadFlag
from keras_psplus.engine import Call
from keras_psplus.files import atomic, integrity
from keras_psplus.keras_internals.keras_parts import TensorFlowTrainer, file_utils, global_state
from keras_psplus.tables.local import outside

# Variables of a model, its metrics and optimizers, made before the first step.

# Of Keras: variables that calls on shapes have made, and that get their values after them.
_UNMADE = "uninitialized_variables"
# Traces a step of a model on a batch of a specification, and runs nothing of it.
Trace = Callable[[keras.Model, Callable[..., Any], Any], None]

_BY_LABELS = "accuracy", "acc", "crossentropy", "ce"


@contextlib.contextmanager
def lifted(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Context in which variables are made eagerly, out of the step that is being traced.

    TensorFlow makes those of a trace otherwise: beside no other variable, and of another class.
    """
    if tf.executing_eagerly():
        yield
        return
    with tf.init_scope(), contextlib.ExitStack() as scope:
        if tf.distribute.get_strategy() is not strategy:
            scope.enter_context(strategy.scope())
        scope.enter_context(tf.variable_creator_scope(_create_eagerly))
        yield


def _create_eagerly(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    return next_creator(**{**kwargs, "experimental_enable_variable_lifting": False})


@contextlib.contextmanager
def _inlined_functions() -> Iterator[None]:
    """Context in which what a `tf.function` does is traced with its caller.

    Of a function that was traced before, the step would not see what it does with variables.
    """
    outer = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(outer)


def trace(run: Callable[[Any], Any], batch_spec: Any) -> None:
    """Traces a function of a batch, which makes variables, without running it."""

    def traced(batch: Any) -> None:
        with _inlined_functions():
            run(batch)

    tf.function(traced, autograph=False).get_concrete_function(batch_spec)


class Builder:
    """Builds models as Keras does, and models with custom steps by tracing these.

    Keras calls the model on the batch. A GAN, a contrastive or a diffusion model takes the batch
    apart in its `train_step`, and its `call` takes something else or does not exist.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        # Layers that a step leaves unbuilt, by the step's name: it is not traced again for them.
        self._left = weakref.WeakKeyDictionary[keras.Model, dict[str, set[int]]]()

    def build(self, model: keras.Model, step_name: str, batch: Any) -> None:
        """Makes the variables that a step of a model needs."""
        try:
            self._build(model, step_name, batch)
        except Exception:
            _forget_unmade(model)
            raise

    def _build(self, model: keras.Model, step_name: str, batch: Any) -> None:
        is_kerass = getattr(type(model), step_name) is getattr(TensorFlowTrainer, step_name)
        # In Keras's own build, ragged and sparse tensors are dense.
        if is_kerass and not any(map(_is_composite, tf.nest.flatten(batch))):
            model._symbolic_build(data_batch=batch)
            return
        left = self._left.setdefault(model, {}).setdefault(step_name, set())
        if not _unbuilt(model) <= left:
            if model.run_eagerly:
                # It may do what cannot be traced: its first step makes what is missing.
                return
            self._build_unbuilt(model, step_name, batch)
            left.clear()
            left.update(_unbuilt(model))
        for layer in model._flatten_layers():
            if _is_container(layer):
                layer.built = True
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _build_unbuilt(self, model: keras.Model, step_name: str, batch: Any) -> None:
        failed = None
        try:
            with _without_metrics_by_labels(model):
                model._symbolic_build(data_batch=batch)
        except Exception as error:
            if any(variable._value is None for variable in model.variables):
                # It could not be made, as with a layout that does not fit: a step would say less.
                raise
            failed = error
        if failed is None and not _unbuilt(model):
            return
        spec = tf.nest.map_structure(_spec_of, batch)
        try:
            self._trace(model, getattr(model, step_name), spec)
        except Exception as error:
            # A tf.function in the step may need AutoGraph. What Keras has built remains.
            if failed is not None:
                raise
            if model._compile_metrics is not None and not model._compile_metrics.built:
                model._symbolic_build(data_batch=batch)
            reason = next(iter(str(error).splitlines()), "")
            log.warn_once(
                "the %s of the model '%s' cannot be traced to build what it alone uses; it goes on "
                "with what a call of the model has built. If its first step asks for variables, "
                "build layers, metrics and optimizers before `fit`. Received: %s: %s",
                *(step_name, model.name, type(error).__name__, reason),
            )


def _forget_unmade(model: keras.Model) -> None:
    """Has Keras forget variables that could not be made: the next model would meet them."""
    own = {id(variable) for variable in model.variables}
    unmade = global_state.get_global_attribute(_UNMADE, [])
    unmade[:] = [variable for variable in unmade if id(variable) not in own]


@contextlib.contextmanager
def _without_metrics_by_labels(model: keras.Model) -> Iterator[None]:
    """Context in which a model has no metrics such as `"accuracy"`.

    Keras chooses their class by the labels, and a step may make others of those in the data.
    """
    metrics = model._compile_metrics
    wanted = metrics and (metrics._user_metrics, metrics._user_weighted_metrics)
    names = {str(one).lower() for one in tf.nest.flatten(wanted)}
    if names.intersection(_BY_LABELS):
        # Keras's own way of setting it would track them once more.
        vars(model)["_compile_metrics"] = None
    try:
        yield
    finally:
        vars(model)["_compile_metrics"] = metrics


def _unbuilt(model: keras.Model) -> set[int]:
    """Ids of what has no variables yet: layers, metrics, the loss, optimizers of the step."""
    layers = [layer for layer in model._flatten_layers() if not _is_container(layer)]
    compiled = [one for one in (model._compile_metrics, model._compile_loss) if one is not None]
    main = unwrapped(model.optimizer)
    of_step = [one for one in optimizers_of(model).values() if one is not main]
    return {id(one) for one in (*layers, *compiled, *of_step) if not one.built}


def _is_container(layer: keras.Layer) -> bool:
    """Whether a layer has no weights but those of its layers."""
    return isinstance(layer, keras.Model) and type(layer).build is keras.Model.build


def _is_composite(leaf: Any) -> bool:
    kinds = (tf.RaggedTensor, tf.SparseTensor, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    return isinstance(leaf, kinds)


def _spec_of(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.TypeSpec):
        return leaf
    spec = tf.type_spec_from_value(leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf))
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


# Units: layers that run, or whose weights travel, as one piece.

LayerT = TypeVar("LayerT", bound=keras.Layer)
_units: weakref.WeakSet[keras.Layer] = weakref.WeakSet()


def unit(layer: LayerT) -> LayerT:
    """Makes a layer, or a nested model, a unit of `shard="all"`.

    Its weights are gathered together and freed together. Layers that contain it are no units, and
    other layers in them are units of their own; weights of such a layer itself are gathered as they
    are read. Elsewhere a mark does nothing. Marks are not saved with a model.

    Args:
        layer: `keras.Layer`.

    Returns:
        The layer.

    Raises:
        ValueError: If it is no layer.

    Example:

    ```python
    class Encoder(keras.layers.Layer):
        def __init__(self, depth):
            super().__init__()
            self.blocks = [keras_psplus.unit(Block()) for _ in range(depth)]
    ```
    """
    if not isinstance(layer, keras.Layer):
        raise ValueError(f"`unit` takes a `keras.Layer`. Received: {layer!r}")
    _units.add(layer)
    return layer


def is_unit(layer: keras.Layer) -> bool:
    """Whether a layer that lies in no unit is one."""
    if layer in _units:
        return True
    if isinstance(layer, keras.Model):
        return False
    return not any(one in _units for one in layer._flatten_layers(include_self=False))


# Saving: files and folders appear whole, with any number of writers.
#
# `model.save`, `save_weights` and `export` are called on all workers by some scripts and on the
# chief alone by others, on disks that are shared or not, so they can wait for nobody. Every caller
# writes to its own temporary folder beside the target and renames: all of them hold the same
# weights, and no reader sees half a file. Nor does the restart of a job whose parameter server died
# while its variables were being written. The target is there when the call returns, on every
# worker.

_skipped: dict[str, set[str]] = {}
# Raised by a thread that exports.
exporting_flag = ThreadFlag()


def attributes_to_skip(call: Call) -> set[str]:
    """Attributes that are not saved, asked for outside of every scope, once.

    Keras makes an optimizer to list the attributes of each kind. In a strategy's scope that
    optimizer's variables would be distributed, and a chief that saves by itself would wait for the
    others.
    """
    if call.owner not in _skipped:
        _skipped[call.owner] = outside(call.proceed)
    return _skipped[call.owner]


def export(strategy: tf.distribute.Strategy, call: Call) -> Any:
    """Exports a model, or an archive of functions, to a folder that appears whole."""
    with exporting_flag.raised(), written(strategy, call.get("filepath"), True) as path:
        return call.proceed(filepath=path)


def export_copies(strategy: tf.distribute.Strategy, call: Call) -> Any:
    """Exports a model, or an archive, while its variables are copies in this process.

    What is exported is traced now; traced with the variables of parameter servers, it would read
    from them, shard by shard.
    """

    def work() -> Any:
        with with_copies(call.owner, copied):
            try:
                return export(strategy, call)
            except AssertionError as error:
                if "untracked" not in str(error):
                    raise
                refuse_traced(call, repr(call.owner))

    return outside(work)


def refuse_traced(call: Call, what: str) -> NoReturn:
    """Raises ValueError as functions that are exported were traced before."""
    raise ValueError(
        "A function that is exported reads variables of the strategy, not their copies in this "
        "process: it was traced before, or the archive does not track its model. Call "
        "`archive.track(model)`, and give `archive.add_endpoint` an `input_signature` and a "
        "function that is no tf.function; `model.export` does both. "
        f"Received: {what} under {type(call.engine.strategy).__name__}"
    )


def copied(variable: keras.Variable) -> tf.Variable:
    """A variable of this process with a Keras variable's value."""
    value = variable._value.numpy()
    return tf.Variable(value, trainable=variable.trainable, name=variable.name)


@contextlib.contextmanager
def with_copies(model: Any, copy: Callable[[keras.Variable], Any]) -> Iterator[list[Any]]:
    """Context in which a model computes with copies of its variables, wherever these are."""
    for variable in model.variables:
        # Pipelines make a variable when it is read, or a model is cut into stages.
        if variable._value is None:
            variable.numpy()
    before = [(variable, variable._value) for variable in model.variables]
    try:
        for variable, _ in before:
            variable._value = copy(variable)
        yield [variable._value for variable, _ in before]
    finally:
        for variable, value in before:
            variable._value = value


def save(strategy: tf.distribute.Strategy, call: Call) -> Any:
    """Saves a model, or its weights, to a file or folder that appears whole."""
    filepath, overwrite = call.get("filepath"), call.get("overwrite", True)
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else None
    if path is None:
        # A file object of the caller's own.
        return call.proceed()
    if path.startswith("hf://"):
        # A commit for each worker would be as many commits of the same.
        return call.proceed() if strategy.is_chief else None
    if not overwrite and os.path.exists(path):
        return call.proceed()
    # A folder's parents are made by Keras, a file's are not.
    makes_folders = call.get("zipped") is False
    with written(strategy, path, makes_folders) as own:
        return call.proceed(filepath=own, overwrite=True)


def save_in_place(call: Call) -> Any:
    """Saves a model, or its weights, as Keras does; a full disk is survived."""
    try:
        return call.proceed()
    except Exception:
        filepath = call.get("filepath")
        if isinstance(filepath, (str, os.PathLike)):
            integrity.divert(os.fspath(filepath))
        raise


@contextlib.contextmanager
def written(
    strategy: tf.distribute.Strategy, filepath: str | os.PathLike[str], makes_folders: bool
) -> Iterator[str]:
    """Context that returns the path to write to instead of the script's."""
    path = os.fspath(filepath)
    folder = os.path.dirname(os.path.realpath(path))
    if file_utils.is_remote_path(path):
        writing: contextlib.AbstractContextManager[str] = atomic.uploaded(path)
    elif makes_folders or os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        writing = atomic.written(path, strategy.task.name if strategy.task else None)
    else:
        # Keras says what is wrong with it.
        writing = contextlib.nullcontext(path)
    with writing as own, SHOWN.instead_of(str(own), path):
        try:
            yield own
        except Exception as error:
            integrity.divert(own)
            error.args = tuple(SHOWN.as_given(one) for one in error.args)
            if getattr(error, "filename", None):
                error.filename = SHOWN.as_given(error.filename)  # type: ignore[attr-defined]
            raise


class _ShownPaths:
    """Paths that are being written, and the script's paths that they stand for."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    @property
    def is_writing(self) -> bool:
        return bool(self._shown)

    @contextlib.contextmanager
    def instead_of(self, written_to: str, given: str) -> Iterator[None]:
        """Context in which messages show the script's path instead of the one written to."""
        self._shown[written_to] = given
        try:
            yield
        finally:
            del self._shown[written_to]

    def as_given(self, text: Any) -> Any:
        """A text of Keras's with the paths that the script has given."""
        for pair in list(self._shown.items()) if isinstance(text, str) else ():
            text = text.replace(*pair)
        return text

    def show_message(self, call: Call) -> Any:
        """Prints Keras's message with the script's path in it."""
        return call.original(self.as_given(call.owner), *call.args, **call.kwargs)


SHOWN = _ShownPaths()
