"""Step functions over all stages' devices, traced once per form of batch."""

from __future__ import annotations

import concurrent.futures
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.base import threads
from keras_psplus.core.base.optimizers import loss_scale
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.pipeline import microbatches, schedule, traffic
from keras_psplus.pipeline.replicas import TraceAgain
from keras_psplus.pipeline.traced_step import PipelineStep

if TYPE_CHECKING:
    from keras_psplus.core.distributed_engine import DistributedEngine
    from keras_psplus.pipeline.context import PipelineContext


# Prefetching of batches to the stages that need them, during the previous step.


_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class Feed:
    """Draws batches, and sends each to its devices before it is asked for."""

    def __init__(self, send: Callable[[Any, bool], Any]) -> None:
        self._send = send
        self._iterator: Callable[[], Any] = lambda: None
        self._next: concurrent.futures.Future[Any] | None = None

    def batches(self, iterator: Any, most: int) -> Iterator[tuple[Any, bool]]:
        """Yields batches of an iterator, and whether tensors are to tell their numbers of rows."""
        if not is_ahead(iterator):
            # One batch that the script has given.
            for _, batch in zip(range(most), iterator):
                yield as_tensors(batch), True
            return
        if self._iterator() is not iterator:
            # It is not kept alive by this: it may hold much of the data.
            self._iterator = weakref.ref(iterator, self._forget)
            self._next = None
        shows_rows = _shows_rows(iterator)
        for _ in range(most):
            ahead = self._next or self._draw(iterator, shows_rows)
            batch = ahead.result()
            self._next = None
            if batch is None:
                return
            self._next = self._draw(iterator, shows_rows)
            yield batch, shows_rows

    def _forget(self, reference: Callable[[], Any]) -> None:
        if self._iterator is reference:
            self._next = None

    def _draw(self, iterator: Iterator[Any], shows_rows: bool) -> concurrent.futures.Future[Any]:
        def draw() -> Any:
            try:
                return self._send(as_tensors(next(iterator)), shows_rows)
            except (StopIteration, tf.errors.OutOfRangeError):
                return None

        return threads.start(draw, "pipeline feed")


def is_ahead(iterator: Any) -> bool:
    return isinstance(iterator, _ITERATORS)


def as_tensors(batch: Any) -> Any:
    return tree.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
    )


def _shows_rows(iterator: Any) -> bool:
    """Whether all batches of an iterator have the same number of rows, which it knows."""
    leaves = tree.flatten(iterator.element_spec)
    shapes = (leaf.shape for leaf in leaves if hasattr(leaf, "shape"))
    return next((shape[0] for shape in shapes if shape.rank), None) is not None


class _GivenBatch(NamedTuple):
    """A batch as a traced function takes it, and, of several pipelines, its form."""

    rows: int | None
    batch: Any
    like: Any


class Functions:
    """One traced function of a batch for each number of rows.

    How a batch is cut is a part of the graph, so the number of rows is known when it is traced;
    other dimensions may differ.
    """

    # Whether calls count in `strategy.communication`, which evaluation does not.
    _counts = False

    def __init__(
        self,
        engine: DistributedEngine,
        context: PipelineContext,
        model: keras.Model,
        function: Callable[..., Any],
        order: Callable[..., Any] | None = None,
        trains: bool = False,
    ) -> None:
        self._engine, self._context, self._model = engine, context, model
        self._function, self._order, self._trains = function, order, trains
        self._counts = self._counts or trains
        self._traced: dict[Any, Callable[..., Any]] = {}
        # Devices on which the parts of a batch are used, None for the chief's.
        self._used_on: dict[Any, list[str | None]] = {}

    def __call__(self, batch: Any, shows_rows: bool) -> Any:
        """Calls the function, whose tensors may tell the number of rows."""
        results, moments = self.of(batch, shows_rows, lambda function, given: function(given))
        self._context.times.note_moments(moments)
        return results

    def of(self, batch: Any, shows_rows: bool, use: Callable[[Any, Any], Any]) -> Any:
        given = batch if isinstance(batch, _GivenBatch) else self._cut(batch)
        key = given.rows, shows_rows
        self._context.finish_writes()
        # Reads what was written.
        self._context.copies.refresh_stale()
        while True:
            if key not in self._traced:
                run = functools.partial(self._run, key=key, like=given.like)
                self._traced[key] = tf.function(run, autograph=False, reduce_retracing=True)
            try:
                return use(self._traced[key], given.batch)
            except TraceAgain:
                del self._traced[key]

    def _cut(self, batch: Any) -> _GivenBatch:
        strategy = self._engine.strategy
        if strategy.pipelines > 1:
            parts = microbatches.cut_batch(batch, strategy.microbatches, strategy.pipelines)
            if parts is not None:
                like = tree.map_structure(lambda _: 0, batch)
                return _GivenBatch(parts.rows, parts.leaves, like)
        return _GivenBatch(microbatches.rows_of(batch), batch, None)

    def send(self, batch: Any, shows_rows: bool) -> Any:
        given = self._cut(batch)
        used_on = self._used_on.get((given.rows, shows_rows))
        if used_on is None:
            return given
        leaves = [
            on_device(device, leaf) if device and isinstance(leaf, tf.Tensor) else leaf
            for device, leaf in zip(used_on, tree.flatten(given.batch))
        ]
        return given._replace(batch=tree.pack_sequence_as(given.batch, leaves))

    def _run(self, batch: Any, key: tuple[int | None, bool], like: Any) -> Any:
        strategy, context = self._engine.strategy, self._context
        graph, given = tf.compat.v1.get_default_graph(), batch
        before = len(graph.get_operations())
        rows, count = None if key[1] else key[0], strategy.microbatches
        if rows is not None and like is None:
            batch = tree.map_structure(microbatches.with_unknown_rows, batch)
        compressor = strategy.compression if self._trains else None
        optimizer = getattr(self._model, "optimizer", None)
        is_lossy = compressor is not None or strategy.activation_compression is not None
        scale = loss_scale(optimizer) if self._trains and is_lossy else None
        with PipelineStep(self._engine, context, count, rows, self._order, self._trains) as step:
            step.clock = context.times.clock() if self._counts else None
            if like is not None:
                assert key[0] is not None
                parts = microbatches.CutBatch(key[0], batch)
                batch = microbatches.join_batch(parts, like, count * strategy.pipelines, step)
            if rows is not None:
                step.note_of_batch(batch)
            step.compiled_calls = self._engine.compiled_calls(self._model)
            results = self._run_in_step(step, batch)
            if step.compiled_calls is not None:
                step.compiled_calls.check()
        step.over_pipelines.check()
        step.finish_backward()
        encoded, transfers = [], step.over_pipelines.crossings
        if compressor is not None:
            encoded += traffic.compress_gradients(graph, transfers, compressor, scale)
        between = traffic.place(graph, before, context.stages)
        moments = None
        if step.clock is not None:
            moments = step.clock.moments(traffic.operations(graph, results))
        if strategy.activation_compression is not None:
            encoded += traffic.compress_activations(
                graph,
                step.activations,
                step.gradients,
                between,
                context.stages,
                strategy.activation_compression,
                scale,
            )
        self._used_on[key] = [
            traffic.of_consumers([leaf]) if isinstance(leaf, tf.Tensor) else None
            for leaf in tree.flatten(given)
        ]
        self._end_trace(graph)
        if self._counts:
            context.traffic.count(graph, results, transfers, encoded)
        return results, moments

    def _run_in_step(self, step: PipelineStep, batch: Any) -> Any:
        return self._engine.strategy.run(self._function, args=(batch,))

    def _end_trace(self, graph: tf.Graph) -> None:
        """Called when all operations of a graph have their devices."""


class PipelineTrainFunction:
    """Train or test function of `fit` and `evaluate`, called with an iterator.

    It `divides` if losses and gradients are computed micro-batch by micro-batch.
    """

    def __init__(
        self,
        engine: DistributedEngine,
        context: PipelineContext,
        model: keras.Model,
        step_function: Callable[..., Any],
        divides: bool,
    ) -> None:
        self._model, self._progress = model, engine.strategy.progress
        self._times = context.times
        self._is_training = step_function == model.train_step
        order = schedule.one_f_one_b if divides else None
        step = microbatches.step_of(model) if divides else step_function
        self._functions = Functions(engine, context, model, step, order, self._is_training)
        self._feed = Feed(self._functions.send)
        self._doing = "training step" if self._is_training else "evaluation step"

    def __call__(self, iterator: Any) -> Any:
        results, steps = None, 0
        self._progress.begin(self._doing)
        try:
            batches = self._feed.batches(iterator, self._model.steps_per_execution)
            for batch, shows_rows in self._times.timed(batches) if self._is_training else batches:
                results = self._functions(batch, shows_rows)
                steps += 1
        finally:
            self._progress.end()
        if not steps:
            raise StopIteration
        if self._is_training:
            self._progress.count(steps)
        return results


class PredictFunction:
    def __init__(
        self, engine: DistributedEngine, context: PipelineContext, model: keras.Model
    ) -> None:
        self._engine, self._model, self._splitter = engine, model, context.splitter
        self._functions = Functions(engine, context, model, model.predict_step)
        self._progress = engine.strategy.progress

    def __call__(self, batches: list[Any]) -> Any:
        batches = [as_tensors(batch) for batch in batches]
        self._splitter.split(self._engine, self._model, batches[0], trains=False)
        self._progress.begin("prediction step")
        try:
            results = [self._functions(batch, shows_rows=True) for batch in batches]
        finally:
            self._progress.end()
        return tree.map_structure(lambda *parts: tf.concat(parts, 0), *results)


def on_device(device: str, tensors: Any) -> Any:
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, tensors, expand_composites=True)
