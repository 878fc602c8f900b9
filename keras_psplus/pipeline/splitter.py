"""Splitter of models into stages, by times of layers, and their variables on these.

A model's first values must not come together on the chief, which may have less memory than all
stages. So a variable whose stage is not known yet is not made: Keras itself knows variables without
a value. It is made when it is given a value or read, on the stage that has the least.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core import plan as plan_request
from keras_psplus.core import seeds
from keras_psplus.engine import Engine
from keras_psplus.keras_internals.keras_parts import (
    TensorFlowTrainer,
    global_state,
    tree,
    unpack_x_y_sample_weight,
)
from keras_psplus.log import logger
from keras_psplus.pipeline import costs, microbatches, plan, schedule
from keras_psplus.pipeline.costs import LayerCall, LayerCost, Times
from keras_psplus.pipeline.replicas import Copies
from keras_psplus.pipeline.stages import Stages, is_in_layer, making_on
from keras_psplus.updates.base import numbers_of

# Measurement of one layer's call on a device, forward and backward.


# Seconds for which calls are repeated, and from which on one is long enough to be timed by itself.
_REPEATED, _LONG = 0.03, 0.25
_MOST_REPEATS, _ROUNDS = 50, 3
# They do more than compute.
_EFFECTS = ("PyFunc", "EagerPyFunc", "NumpyFunc", "Print", "PrintV2")


class CannotBeTimed(Exception):
    """A layer has effects that must not be repeated, or tensors that are not dense."""


def time_layer_call(layer: keras.Layer, call: LayerCall, rows: int, device: str) -> Times:
    """Milliseconds of one call of a layer in training.

    The layer is called with tensors of the same forms in the place of its inputs and variables, so
    its variables need not be there, and are not changed. All of that is made on the device, by the
    function that is timed, and gone when it ends.
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
    # The time of the call itself, on the way to a worker, is in both.
    if (repeated := together - min(once, alone)) > 0:
        return 1e3 * repeated / repeats
    # Others used the processor just then: the most that it can take.
    return 1e3 * together / (1 + repeats)


def _repeated(
    layer: keras.Layer, call: LayerCall, rows: int, device: str, with_backward: bool
) -> tf.types.experimental.ConcreteFunction:
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
            # TensorFlow would not compute results that nothing needs.
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
    return (1 + _BACKWARD) * rows * sum(cost.flops for cost in costs) >= _LEAST_FLOPS


def counted(costs: Sequence[LayerCost]) -> list[Times]:
    """Times as floating-point operations for a row have them, in no unit."""
    # Layers without work (Flatten, Dropout in evaluation) count a little: they are calls.
    return [Times(cost.flops + 0.5, _BACKWARD * cost.flops + 0.5) for cost in costs]


def measured(costs: Sequence[LayerCost], rows: int, device: str) -> list[Times] | None:
    """Measures layers, one at a time, those with the most operations first.

    Layers that are alike are measured once. One that cannot be measured, or comes too late, takes
    as long for an operation as those that were. The times are milliseconds for a micro-batch.
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

    A layer may make layers, or draw numbers of a generator made then, in its `call`.
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


class Variables:
    def __init__(self, strategy: tf.distribute.Strategy, stages: Stages, copies: Copies) -> None:
        self._strategy: Callable[[], tf.distribute.Strategy] = weakref.ref(strategy)
        self._stages, self._copies = stages, copies
        self._bytes = [0] * len(stages.devices)
        # By ids, as Keras's variables have no hash: variables with their stages, and slots with the
        # variables that they belong to.
        self._placed: dict[int, tuple[Any, int]] = {}
        self._slots: dict[int, tuple[Any, Any]] = {}

    def initialize(self, variable: keras.Variable, initializer: Any) -> None:
        """Makes a variable that a layer or something else makes, or leaves it for later."""
        device = self._strategy().extended.making_on()
        number = self._stages.of_scope()
        if device is not None:
            self._make(variable, initializer, self._stages.of_device(device), device)
        elif number is not None:
            self._make(variable, initializer, number)
        elif not is_in_layer():
            self._make(variable, initializer, len(self._bytes) - 1)
        elif variable._initializer is not None:
            # Keras forgets the initializer of a variable that it had deferred.
            self._make(variable, initializer, self._emptiest())
        else:
            variable._value, variable._initializer = None, initializer

    def beside(self, variable: keras.Variable) -> AbstractContextManager[None]:
        """Context in which variables are made where another one is."""
        self.ensure(variable)
        return making_on(self._strategy(), variable._value.device)

    def ensure(self, variable: keras.Variable) -> None:
        if variable._value is None and variable._initializer is not None:
            self.put(variable, self._emptiest())

    def put(self, variable: keras.Variable, number: int, pipeline: int = 0) -> None:
        """Makes a variable on a pipeline's stage, or moves it there."""
        device = self._stages.device(number, pipeline)
        if variable._value is None and variable._initializer is not None:
            initializer, variable._initializer = variable._initializer, None
            self._make(variable, initializer, number, device)
        elif isinstance(variable._value, tf.Variable) and variable._value.device != device:
            old = variable._value
            with making_on(self._strategy(), device), tf.name_scope(""):
                variable._value = tf.Variable(
                    _on(device, old.read_value),
                    trainable=old.trainable,
                    name=old.name.removesuffix(":0"),
                )
            # Optimizers know a variable by this.
            variable._value._unique_id = old._unique_id

    def place(self, variable: keras.Variable, number: int) -> None:
        """Puts a variable on a stage for good: traced functions know it there."""
        if self.stage_of_placed(variable) is None:
            pipeline = self._copies.pipeline_for(variable, number)
            self.put(variable, number, pipeline)
            self._placed[id(variable)] = weakref.ref(variable), number
            self._copies.make(variable, number, pipeline)

    def stage_of_placed(self, variable: keras.Variable) -> int | None:
        known, number = self._placed.get(id(variable), (lambda: None, None))
        return number if known() is variable else None

    def note_slot(self, slot: keras.Variable, reference: keras.Variable) -> None:
        """Notes a slot of an optimizer, which follows its variable."""
        self._slots[id(slot)] = weakref.ref(slot), weakref.ref(reference)

    def place_slots(self) -> None:
        """Puts slots where their variables were placed since."""
        for key, (slot, reference) in list(self._slots.items()):
            if slot() is None or reference() is None:
                del self._slots[key]
                continue
            number = self.stage_of_placed(reference())
            if number is not None and self.stage_of_placed(slot()) is None:
                pipeline = self._copies.pipeline_of(reference())
                self.put(slot(), number, pipeline)
                self._placed[key] = slot, number

    def _make(
        self,
        variable: keras.Variable,
        initializer: Callable[..., Any],
        number: int,
        device: str | None = None,
    ) -> None:
        device, trainable = device or self._stages.devices[number], variable._trainable
        # It may be frozen before it is made, and thawed after.
        variable._trainable = getattr(variable, "_is_made_to_train", trainable)
        # By its name, an optimizer may leave it out of weight decay: it is that of one process.
        scope, slash, _ = variable.path.rpartition("/")
        try:
            with making_on(self._strategy(), device), tf.name_scope(scope + slash):
                variable._initialize(
                    _on(device, lambda: initializer(variable._shape, dtype=variable._dtype))
                )
        finally:
            variable._trainable = trainable
        self._bytes[number] += variable._value.shape.num_elements() * variable._value.dtype.size

    def _emptiest(self) -> int:
        return self._bytes.index(min(self._bytes))


def _on(device: str, function: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
    """A function without arguments that runs on a device, also where TensorFlow clears devices."""

    def on_device() -> tf.Tensor:
        with tf.device(device):
            return function()

    return on_device


# Rows of a micro-batch where data do not tell.
_ROWS = 32


def _own_step(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """A model's own train or predict step, whose `call` may take more than the batch."""
    is_own = getattr(type(model), name) is not getattr(TensorFlowTrainer, name)
    return model._autoconvert_optionals(getattr(model, name)) if is_own else None


class Splitter:
    """Splits the models of one strategy, by patterns, measured times, or operations."""

    def __init__(
        self,
        stages: Stages,
        variables: Variables,
        patterns: list[list[str]] | None,
        measures: bool = True,
    ) -> None:
        self._stages, self._variables = stages, variables
        self._patterns, self._measures = patterns, measures
        self._plans: weakref.WeakKeyDictionary[keras.Model, plan.Plan] = weakref.WeakKeyDictionary()
        # Models whose outputs have masks.
        self._masked: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def has_masks(self, model: keras.Model) -> bool:
        return model in self._masked

    def split(
        self,
        engine: Engine,
        model: keras.Model,
        batch_spec: Any,
        trains: bool,
        batch_rows: int | None = None,
    ) -> None:
        """Puts a model's layers and variables on stages, once; to train, none is empty."""
        if model in self._plans:
            return
        strategy = engine.strategy
        x, _, _ = unpack_x_y_sample_weight(batch_spec)
        step = _own_step(model, "train_step" if trains else "predict_step")
        with strategy.scope():
            found, has_masks, applied = costs.of_layers(
                engine, model, x if step is None else batch_spec, step
            )
        if has_masks:
            self._masked.add(model)
        for cost in found:
            # Of another model that was split before, perhaps inside of one of its layers.
            placed = [self._variables.stage_of_placed(v) for v in cost.layer.variables]
            known = next((number for number in placed if number is not None), None)
            if known is not None:
                self._stages.put(cost.layer, known)
        split = self._split(strategy, model, batch_rows or microbatches.rows_of_spec(x))
        times = self._measured(found, split)
        are_milliseconds = times is not None
        times = times or counted(found)
        numbers = self._stages_of(found, times, split, trains)
        made = plan.make(model.name, found, numbers, times, are_milliseconds, split)
        if (request := plan_request.read()) is not None:
            request.answer({"text": str(made), "plan": made.as_dict()})
        for cost, number in zip(found, numbers):
            self._stages.put(cost.layer, number)
        self._put_variables(model)
        with strategy.scope():
            for optimizer, variables in applied:
                if not optimizer.built:
                    optimizer.build(variables)
        self._plans[model] = strategy.plan = made
        logger.info("%s", made)

    def _split(
        self, strategy: tf.distribute.Strategy, model: keras.Model, batch_rows: int | None
    ) -> plan.Split:
        stages, name = self._stages, strategy.schedule
        batch_rows = batch_rows or _ROWS * strategy.microbatches
        if name == "1f1b" and (model in self._masked or microbatches.why_not_divided(model)):
            name = "gpipe"
        # Each pipeline has its part of the batch.
        batch_rows = math.ceil(batch_rows / stages.pipelines)
        count = min(strategy.microbatches, batch_rows)
        order = schedule.SCHEDULES["1f1b" if name == schedule.PIPEDREAM else name]
        return plan.Split(
            stages.devices,
            name,
            order(len(stages.devices), count),
            count,
            batch_rows,
            costs.slots_of(getattr(model, "optimizer", None)),
            [stages.others_of(number) for number in range(len(stages.devices))],
        )

    def _measured(self, found: Sequence[LayerCost], split: plan.Split) -> list[Times] | None:
        """Measured times of layers for a micro-batch; None if not wanted or not worthwhile."""
        if not self._measures or not is_worth_it(found, split.rows):
            return None
        return measured(found, split.rows_of_microbatch, split.devices[0])

    def _stages_of(
        self, found: Sequence[LayerCost], times: Sequence[Times], split: plan.Split, trains: bool
    ) -> list[int]:
        names = [cost.layer.name for cost in found]
        known = [self._stages.of(cost.layer) for cost in found]
        placed = [number for number in known if number is not None]
        if found and len(placed) == len(found):
            return placed
        if self._patterns is not None:
            return plan.by_patterns(names, self._patterns, all_fit=not self._plans)
        if placed:
            return plan.with_neighbours(known)
        stages = len(self._stages.devices)
        return plan.balance(
            [one.total for one in times],
            stages if trains else min(stages, len(found)),
            costs.MemoryOfParts(found, split.kept_rows, split.slots),
            [costs.sent_before(found, number) for number in range(len(found))].__getitem__,
        )

    def _put_variables(self, model: keras.Model) -> None:
        seen, last = set(), len(self._stages.devices) - 1

        def visit(layer: keras.Layer, number: int | None) -> None:
            if id(layer) in seen:
                return
            seen.add(id(layer))
            # A layer inside another one is where that one is.
            number = self._stages.of(layer) if number is None else number
            of_layer = [
                *layer._trainable_variables,
                *layer._non_trainable_variables,
                *(generator.state for generator in layer._seed_generators),
            ]
            for variable in of_layer:
                self._variables.place(variable, last if number is None else number)
            for inner in layer._layers:
                visit(inner, number)

        visit(model, None)
        self._variables.place_slots()
