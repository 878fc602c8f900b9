"""Times of a model's layers, measured on a stage's device or estimated from operations."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.core import seeds
from keras_psplus.keras_internals.keras_parts import global_state, tree
from keras_psplus.log import logger
from keras_psplus.pipeline.split.costs import LayerCall, LayerCost
from keras_psplus.updates.base import numbers_of

# Measurement of one layer's call on a device, forward and backward.


# Seconds for which calls are repeated, and from which on one is long enough to be timed by itself.
_REPEATED, _LONG = 0.03, 0.25
_MOST_REPEATS, _ROUNDS = 50, 3
# They do more than compute.
_EFFECTS = ("PyFunc", "EagerPyFunc", "NumpyFunc", "Print", "PrintV2")


class Times(NamedTuple):
    forward: float
    backward: float

    @property
    def total(self) -> float:
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


_SEED_GENERATOR, _NAMES = "global_seed_generator", "object_name_uids"
# Seconds after which no other layer is measured.
_BUDGET = 20.0
# A step of fewer operations is over before a measurement would be.
_LEAST_FLOPS = 1e9
# A backward pass computes gradients by inputs and by weights.
_BACKWARD = 2
# A dead worker is the job's matter, not a layer's.
_FATAL = (tf.errors.UnavailableError, tf.errors.AbortedError)


def is_worth_it(costs: Sequence[LayerCost], rows: int) -> bool:
    """Whether a step of a batch takes long enough for layers to be measured."""
    return (1 + _BACKWARD) * rows * sum(cost.flops for cost in costs) >= _LEAST_FLOPS


def counted(costs: Sequence[LayerCost]) -> list[Times]:
    """Times as floating-point operations for a row have them, in no unit."""
    # Layers without work (Flatten, Dropout in evaluation) count a little: they are calls.
    return [Times(cost.flops + 0.5, _BACKWARD * cost.flops + 0.5) for cost in costs]


def measured(costs: Sequence[LayerCost], rows: int, device: str) -> list[Times] | None:
    """Measures layers, one at a time, those with the most operations first.

    Layers that are alike are measured once. One that cannot be measured, or comes too late, takes
    as long for an operation as those that were measured.

    Returns:
        List of `Times` in milliseconds for a micro-batch; None if no layer could be measured.
    """
    keys = [_key(cost) for cost in costs]
    deadline = time.monotonic() + _BUDGET
    found: dict[Any, Times | None] = {}
    reasons = {}
    for cost, key in sorted(zip(costs, keys), key=lambda pair: -pair[0].flops):
        if key in found:
            continue
        if time.monotonic() > deadline:
            reasons[cost.layer.name] = f"{_BUDGET:g} s are over"
            continue
        try:
            found[key] = _of_layer(cost, rows, device)
        except _FATAL:
            raise
        except Exception as error:
            found[key] = None
            reasons[cost.layer.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    times = [found.get(key) for key in keys]
    if reasons:
        name, reason = next(iter(reasons.items()))
        rest = f" and {len(reasons) - 1} other(s)" if len(reasons) > 1 else ""
        logger.info(
            "%s could not be measured, and is judged by its floating-point operations (%s)",
            f"the layer '{name}'{rest}",
            reason,
        )
    if not any(times):
        return None
    known = [(cost.flops, one) for cost, one in zip(costs, times) if one is not None]
    flops = sum(flops for flops, _ in known) or 1.0
    forward = sum(one.forward for _, one in known) / flops
    backward = sum(one.backward for _, one in known) / flops
    return [
        one or Times(forward * cost.flops, backward * cost.flops) for cost, one in zip(costs, times)
    ]


def _of_layer(cost: LayerCost, rows: int, device: str) -> Times:
    if None in cost.calls:
        raise CannotBeTimed("it is called with something else than dense tensors")
    with _isolated_global_state():
        times = [time_layer_call(cost.layer, call, rows, device) for call in cost.calls]
    return Times(sum(one.forward for one in times), sum(one.backward for one in times))


def _key(cost: LayerCost) -> tuple[Any, ...]:
    """Key of a layer, equal for layers that take equally long."""
    layer = cost.layer
    try:
        config = json.dumps(_without_names(layer.get_config()), sort_keys=True, default=str)
    except Exception:  # It cannot be saved either.
        config = str(id(layer))
    variables = tuple((tuple(v.shape), str(v.dtype), v.trainable) for v in layer.variables)
    calls = tuple(
        (str(tree.flatten((call.args, call.kwargs))) if call else None) for call in cost.calls
    )
    return type(layer), config, variables, calls, cost.flops


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    return [_without_names(one) for one in config] if isinstance(config, (list, tuple)) else config


@contextlib.contextmanager
def _isolated_global_state() -> Iterator[None]:
    """Context after which seeds and the counters of names are what they were.

    A layer may make layers, or draw numbers of a generator that is made then, in its `call`. What
    the script makes after this has the names and first values that it has without.
    """
    generator = global_state.get_global_attribute(_SEED_GENERATOR)
    names = global_state.get_global_attribute(_NAMES)
    had = None if names is None else dict(names)
    try:
        with seeds.untouched():
            yield
    finally:
        global_state.set_global_attribute(_SEED_GENERATOR, generator)
        names = global_state.get_global_attribute(_NAMES)
        if names is not None:
            names.clear()
            names.update(had or {})
