"""Variables of a model, its metrics and optimizers, made before the first step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_psplus import log
from keras_psplus.core.base.optimizers import optimizers_of, unwrapped
from keras_psplus.keras_internals.keras_parts import TensorFlowTrainer, global_state

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
    """Traces a function of a batch, which makes variables, without running it.

    Args:
        batch_spec: Type specification of the batch.
    """

    def traced(batch: Any) -> None:
        with _inlined_functions():
            run(batch)

    tf.function(traced, autograph=False).get_concrete_function(batch_spec)


class Builder:
    """Builds models as Keras does, and models with custom steps by tracing these.

    Keras calls the model on the batch. A GAN, a contrastive or a diffusion model takes the batch
    apart in its `train_step`, and its `call` takes something else or does not exist.

    Args:
        trace: Function of the model, the step and the batch's specification, in the scope.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        # What a step leaves unbuilt, by the step's name: it is not traced again for that.
        self._left = weakref.WeakKeyDictionary[keras.Model, dict[str, set[int]]]()

    def build(self, model: keras.Model, step_name: str, batch: Any) -> None:
        """Makes the variables that a step of a model needs.

        Args:
            step_name: `"train_step"` or `"test_step"`.
            batch: The batch, or its type specification.
        """
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
        """Builds by a call on the batch, as Keras does, or else by the step."""
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
