"""Measurement of one layer's call on a device, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.pipeline.graph.layer_call import LayerCall
from keras_psplus.updates.values import numbers_of

# Seconds for which calls are repeated, and from which on one is long enough to be timed by itself.
_REPEATED, _LONG = 0.03, 0.25
_MOST_REPEATS, _ROUNDS = 50, 3
# They do more than compute.
_EFFECTS = ("PyFunc", "EagerPyFunc", "NumpyFunc", "Print", "PrintV2")


class Times(NamedTuple):
    """Forward and backward times."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.forward + self.backward


class CannotBeTimed(Exception):
    """A layer cannot be timed.

    It has side effects that must not be repeated, or its tensors are not all dense.
    """


def time_layer_call(layer: keras.Layer, call: LayerCall, rows: int, device: str) -> Times:
    """Milliseconds of one call of a layer in training.

    The layer is called with tensors of the same forms in the place of its inputs and variables, so
    its variables need not be there, and are not changed. All of that is made on the device, by the
    function that is timed, and gone when it ends.

    Args:
        layer: Keras layer, built.
        call: With what it is called.
        rows: Rows of the batch.

    Raises:
        CannotBeTimed: If the layer has other state than Keras variables, or effects.
    """
    both = _milliseconds(layer, call, rows, device, with_backward=True)
    forward = _milliseconds(layer, call, rows, device, with_backward=False)
    return Times(min(forward, both), max(0.0, both - forward))


def _milliseconds(
    layer: keras.Layer, call: LayerCall, rows: int, device: str, with_backward: bool
) -> float:
    function = _repeated(layer, call, rows, device, with_backward)
    _check(function.graph)

    def seconds(repeats: int) -> float:
        start = time.perf_counter()
        # Arguments that are not known when the graph is made: nothing is computed beforehand.
        function(tf.constant(repeats), tf.constant([1, 2]), tf.constant(0.05)).numpy()
        return time.perf_counter() - start

    # TensorFlow prepares the function at its first call.
    if (once := seconds(1)) > 1 or (once := seconds(1)) > _LONG:
        return 1e3 * once
    repeats = max(2, min(_MOST_REPEATS, int(_REPEATED / once)))
    # Others use the processor as well: the least is nearest to what the layer takes.
    rounds = [(seconds(1), seconds(1 + repeats)) for _ in range(_ROUNDS)]
    alone, together = (min(of_rounds) for of_rounds in zip(*rounds))
    # What a call of the function itself takes, on the way to a worker, is in both.
    if (repeated := together - min(once, alone)) > 0:
        return 1e3 * repeated / repeats
    # Others used the processor just then: the most that it can take.
    return 1e3 * together / (1 + repeats)


def _repeated(
    layer: keras.Layer, call: LayerCall, rows: int, device: str, with_backward: bool
) -> tf.types.experimental.ConcreteFunction:
    """A function that calls a layer some times, one after the other."""

    def run(repeats: tf.Tensor, seed: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        def draw(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
            if dtype.is_floating:
                return tf.cast(tf.random.stateless_uniform(shape, seed), dtype)
            if dtype.is_integer and isinstance(getattr(layer, "input_dim", None), int):
                # The rows of a table.
                drawn = tf.random.stateless_uniform(shape, seed, 0, layer.input_dim, tf.int32)
                return tf.cast(drawn, dtype)
            return tf.fill(shape, tf.cast(value, dtype))

        args, kwargs, sources = call.make(rows, draw)
        if layer._call_has_training_arg:
            kwargs = {**kwargs, "training": True}
        weights = [(v, tf.fill(v.shape, tf.cast(value, v.dtype))) for v in layer.variables]
        trained = {id(v) for v in layer.trainable_variables}
        sources += [one for v, one in weights if id(v) in trained]

        def body(number: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape, keras.StatelessScope(weights):
                tape.watch(sources)
                outputs = tree.flatten(layer(*args, **kwargs))
            needed = [leaf for leaf in outputs if isinstance(leaf, tf.Tensor)]
            if with_backward:
                targets = [one for one in needed if one.dtype.is_floating]
                found = tape.gradient(targets, sources, output_gradients=targets)
                needed += [one for one in found if one is not None]
            # What nothing is needed of would not be computed.
            return number + 1, total + tf.add_n([_first(one) for one in needed])

        return tf.while_loop(
            lambda number, _: number < repeats,
            body,
            (tf.constant(0), tf.constant(0.0)),
            parallel_iterations=1,
        )[1]

    def run_on_device(*args: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            return run(*args)

    return tf.function(run_on_device, autograph=False).get_concrete_function(
        tf.TensorSpec([], tf.int32), tf.TensorSpec([2], tf.int32), tf.TensorSpec([], tf.float32)
    )


def _first(found: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The first element of a tensor or a gradient."""
    (values,) = numbers_of([found])
    return tf.reduce_sum(tf.cast(tf.reshape(values, [-1])[:1], tf.float32))


def _check(graph: tf.Graph) -> None:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    effects = sorted({node.op for node in nodes if node.op in _EFFECTS})
    has_state = any(t.dtype in (tf.resource, tf.variant) for t, _ in graph.captures)
    if effects or has_state:
        raise CannotBeTimed(
            "it has effects, or other state than Keras variables. "
            f"Received: {', '.join(effects) or 'resources'}"
        )
