"""Pipelines side by side: copies of weights, and sums of gradients over pipelines."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.pipeline import boundary
from keras_psplus.pipeline.stages import Stages, making_on
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import record, resource_variable_ops

# Copies of weights: each pipeline computes with its copies, and steps update one of them.
#
# Of each variable that was made to be trained, one pipeline has the primary: the Keras variable's
# value between steps, beside its optimizer slots. The others have copies, which are given the
# primary's value before a step uses them, in the same traced function: what a step needs first is
# sent first, and nothing that a callback or a file has changed can be missed. What is not trained
# (moving statistics, states of seed generators) has no copies: micro-batches read and change it in
# turn.


@dataclasses.dataclass(eq=False)
class Copied:
    """A variable that every pipeline has, and whose primary one of them.

    If micro-batches change it, it `is_state`: they read and change the primary. It `changes` if
    steps change it though it is not trained.
    """

    variable: Any
    primary: tf.Variable
    pipeline: int
    copies: dict[int, tf.Variable]
    is_state: bool = False
    changes: bool = False

    @property
    def path(self) -> str | None:
        variable = self.variable()
        return None if variable is None else variable.path

    def refresh(self) -> None:
        for copy in self.copies.values():
            # The tapes of a training step have nothing to do with it.
            with record.stop_recording(), ops.device(copy.device):
                copy.assign(self.primary.read_value(), read_value=False)


class Reads:
    def __init__(self, copied: Iterable[Copied], pipeline: int) -> None:
        self._pairs = [
            (one.variable, one.copies[pipeline]) for one in copied if pipeline in one.copies
        ]
        self._before: list[list[tuple[Any, Any]]] = []

    def __enter__(self) -> Reads:
        variables = [(variable(), copy) for variable, copy in self._pairs]
        self._before.append([(v, v._value) for v, _ in variables if v is not None])
        for variable, copy in variables:
            if variable is not None:
                variable._value = copy
        return self

    def __exit__(self, *exc: Any) -> None:
        for variable, value in self._before.pop():
            variable._value = value


class Copies:
    def __init__(self, strategy: tf.distribute.Strategy, stages: Stages) -> None:
        self._strategy, self._stages = weakref.ref(strategy), stages
        self.pipelines = stages.pipelines
        # Bytes of the primaries, by stage and pipeline.
        self._bytes: dict[tuple[int, int], int] = {}
        # By ids of Keras variables, and of their values and copies.
        self._of_variable: dict[int, Copied] = {}
        self._of_value: dict[int, tuple[Copied, int]] = {}
        # Whether primaries may have changed since the copies were given their values.
        self.is_stale = False
        self._refresh_all: Any = None

    def pipeline_for(self, variable: keras.Variable, stage: int) -> int:
        """The pipeline whose worker is to have a primary; they are dealt out by bytes."""
        if not self._is_copied(variable):
            return 0
        held = [self._bytes.get((stage, pipeline), 0) for pipeline in range(self.pipelines)]
        pipeline = held.index(min(held))
        elements = tf.TensorShape(variable.shape).num_elements()
        size = elements * tf.as_dtype(variable._dtype).size
        self._bytes[stage, pipeline] = held[pipeline] + size
        return pipeline

    def make(self, variable: keras.Variable, stage: int, pipeline: int) -> None:
        if not self._is_copied(variable):
            return
        primary, copies = variable._value, {}
        for other in set(range(self.pipelines)) - {pipeline}:
            device = self._stages.device(stage, other)
            with tf.device(device):
                value = primary.read_value()
            with making_on(self._strategy(), device), tf.device(device):
                copies[other] = tf.Variable(
                    value, trainable=primary.trainable, name=f"{variable.name}_{other}"
                )
        key = id(variable)
        copied = Copied(weakref.ref(variable), primary, pipeline, copies)
        weakref.finalize(variable, self._forget, key, copied).atexit = False
        self._of_variable[key] = copied
        for number, value in [(pipeline, primary), *copies.items()]:
            self._of_value[id(value)] = copied, number
        self._refresh_all = None

    def pipeline_of(self, variable: keras.Variable) -> int:
        """The pipeline that has a variable's primary."""
        copied = self.of(variable)
        return 0 if copied is None else copied.pipeline

    def of(self, variable: keras.Variable) -> Copied | None:
        copied = self._of_variable.get(id(variable))
        return copied if copied is not None and copied.variable() is variable else None

    def find(self, value: tf.Variable) -> tuple[Copied, int] | None:
        """To which variable a primary or a copy belongs, and to which pipeline; or None."""
        return self._of_value.get(id(value))

    def of_layer(self, layer: keras.Layer) -> list[Copied]:
        if self.pipelines == 1:
            return []
        found = {}
        for one in layer._flatten_layers():
            for variable in (*one._trainable_variables, *one._non_trainable_variables):
                copied = self.of(variable)
                if copied is not None and not copied.is_state:
                    found[id(variable)] = copied
        return list(found.values())

    def every(self) -> list[Copied]:
        return list(self._of_variable.values())

    def note_changed(self, variable: keras.Variable | tf.Variable) -> None:
        """Notes an assignment to a variable, in a traced step or outside of one."""
        if self.pipelines == 1:
            return
        copied = self.of(variable) or (self.find(variable) or (None,))[0]
        note = getattr(current_step(), "note_changed", None)
        if note is None:
            self.is_stale = True
        elif copied is not None:
            note(copied)

    def refresh_stale(self) -> None:
        """Gives all copies their values before a step, if that may be necessary."""
        if not self.is_stale or not self._of_variable:
            return
        if self._refresh_all is None:
            copied = self.every()

            def refresh_all() -> None:
                for one in copied:
                    one.refresh()

            self._refresh_all = tf.function(refresh_all, autograph=False)
        self._refresh_all()
        self.is_stale = False

    def _is_copied(self, variable: keras.Variable) -> bool:
        is_weight = getattr(variable, "_is_made_to_train", False)
        return self.pipelines > 1 and is_weight and tf.as_dtype(variable._dtype).is_floating

    def _forget(self, key: int, copied: Copied) -> None:
        if self._of_variable.get(key) is copied:
            del self._of_variable[key]
        for value in (copied.primary, *copied.copies.values()):
            self._of_value.pop(id(value), None)
        self._refresh_all = None


# Gradient sums over pipelines, and copies of weights, while a step is traced.


class TraceAgain(Exception):
    """A trace has shown that it should have read another copy of a variable."""


@dataclasses.dataclass(eq=False)
class ReplicaTransfer:
    """A gradient's sum on its way from one pipeline to another, which has the primary."""

    copied: Copied
    pipeline: int
    sent: tf.Tensor | tf.IndexedSlices
    arrived: tf.Tensor | tf.IndexedSlices


class PipelineSums:
    """Communication between the pipelines of a step.

    Each sums the gradients of its micro-batches on its devices. One tensor for each variable
    crosses to the variable's primary. A step `trains` if weights may change in it, or have since
    the one before.
    """

    def __init__(self, copies: Copies, trains: bool) -> None:
        self._copies, self._pipelines = copies, copies.pipelines
        self._trains, self._graph = trains, tf.compat.v1.get_default_graph()
        # By ids of primaries: those whose copies have their values, and those that are frozen.
        self._fresh: set[int] = set()
        self._frozen: set[int] = set()
        self._must_trace_again = False
        self.crossings: list[ReplicaTransfer] = []

    def reads(self, layer: keras.Layer) -> list[Reads]:
        """For each pipeline, a context in which a layer's weights are the pipeline's copies."""
        found = self._copies.of_layer(layer)
        for copied in found if self._trains else ():
            self._refresh(copied)
            _note_copies(copied)
        return [Reads(found, pipeline) for pipeline in range(self._pipelines)]

    def _refresh(self, copied: Copied) -> None:
        key = id(copied.primary)
        if key in self._fresh or key in self._frozen:
            return
        variable = copied.variable()
        if not copied.changes and variable is not None and not variable._trainable:
            self._frozen.add(key)  # It would travel at each step, and is always the same.
            return
        copied.refresh()
        # A branch that is not taken gives no values.
        if tf.compat.v1.get_default_graph() is self._graph:
            self._fresh.add(key)

    def note_changed(self, copied: Copied, in_microbatch: bool) -> None:
        key = id(copied.primary)
        self._fresh.discard(key)
        if in_microbatch and not copied.is_state:
            copied.is_state = self._must_trace_again = True
        if key in self._frozen:
            copied.changes = self._must_trace_again = True

    def check(self) -> None:
        """Raises `TraceAgain` if a variable changes that was taken for one that does not."""
        if self._must_trace_again:
            raise TraceAgain

    def of_variables(
        self, variables: list[tf.Variable]
    ) -> tuple[list[tf.Variable], Callable[[list[Any]], list[Any]]]:
        """Primaries of variables, and a function that maps gradients by them."""
        found = [self._copies.find(variable) for variable in variables]
        primaries = {}
        for variable, known in zip(variables, found):
            primary = variable if known is None else known[0].primary
            primaries[id(primary)] = primary
        for primary in primaries.values():
            # The tapes outside have perhaps seen copies alone.
            if any(primary is not variable for variable in variables):
                resource_variable_ops.variable_accessed(primary)

        def total(sums: Sequence[Any]) -> list[Any]:
            parts: dict[int, dict[int, Any]] = {}
            for variable, known, gradient in zip(variables, found, sums):
                if known is None:
                    parts[id(variable)] = {0: gradient}
                else:
                    copied, pipeline = known
                    parts.setdefault(id(copied.primary), {})[pipeline] = gradient
            return [self._total(primary, parts[key]) for key, primary in primaries.items()]

        return list(primaries.values()), total

    def total(self, weights: list[keras.Variable], sums: dict[int, list[Any]]) -> list[Any]:
        """Gradients of the batch, of those of each pipeline's micro-batches."""
        return [
            self._total(weight._value, {pipeline: own[i] for pipeline, own in sums.items()})
            for i, weight in enumerate(weights)
        ]

    def _total(self, primary: tf.Variable, parts: dict[int, Any]) -> Any:
        if len(parts) == 1 and self._pipelines == 1:
            return next(iter(parts.values()))
        copied, home = self._copies.find(primary) or (None, 0)
        total = parts.get(home)
        with ops.device(primary.device):
            for pipeline, gradient in parts.items():
                if pipeline == home or gradient is None:
                    continue
                if copied is not None and not copied.is_state:
                    arrived = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                    self.crossings.append(ReplicaTransfer(copied, pipeline, gradient, arrived))
                    gradient = arrived
                total = boundary.add(total, gradient)
        return total


def _note_copies(copied: Copied) -> None:
    """Lets gradients of gradients, which tapes outside compute by copies, count for the primary."""
    resource_variable_ops.variable_accessed(copied.primary)
    for copy in copied.copies.values():
        record.record_operation(
            "CopyOfWeight", [copy.handle], [copied.primary.handle], lambda gradient: [gradient]
        )
