"""A replica's step, and the gradients of its tapes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

import keras
import tensorflow as tf

from keras_psplus.compression import outer_products
from keras_psplus.core.batch import batches
from keras_psplus.core.batch.replica_step import ReplicaStep, current_step
from keras_psplus.core.graph import stand_ins
from keras_psplus.core.graph.metrics import added
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.keras_internals.keras_parts import Variable
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import record
from keras_psplus.tf_internals.composite_variable import own_copy
from keras_psplus.tf_internals.trace_end import call_at_end
from keras_psplus.updates import map_values
from keras_psplus.updates.base import numbers_of

if TYPE_CHECKING:
    from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
    from keras_psplus.engine import Engine


# Gradients of a custom training step, which are those of the global batch.
#
# A replica's tape knows the replica's part of a gradient only. Summed there and then, it would be
# sent before the optimizer could accumulate or compress it. So the tape gives a stand-in for each
# gradient, and its optimizer finds out what has become of it:
#
# - It is the stand-in itself, and nothing else has used that: the replica's part goes to the
#   optimizer, which sums as late as it can. No operation is added to the graph.
# - The step has computed with it (clipped, normalised, logged, perturbed weights by it, kept it in
#   a variable): the parts of that call of the tape are summed before, and the sums put in the
#   stand-ins' place. What the optimizer is given is then the same on all replicas, and is applied
#   as it is.
# - It is anything else: read from a variable, derived by hand from the replica's rows, returned by
#   a function. It is averaged over the replicas, each of which counts by its rows: a value that is
#   the same everywhere stays what it is, and a mean over rows becomes that of the global batch.
#
# The first use may come after the optimizer's, as in logs, or there may be no optimizer: that is
# found before the next collective, and at the step's end; in a function or a branch, at its end. A
# loop may turn another number of times on each replica, and what is left in it without an optimizer
# stays the replica's: there, a gradient is that of the mean over the replica's rows.


class Summed(NamedTuple):
    """Gradients that an optimizer is to apply.

    Attributes:
        grads: List of tensors, `tf.IndexedSlices` or None: parts of replicas, and global ones.
        whole: Set of numbers of those that are global gradients already.
    """

    grads: list[Gradient | None]
    whole: set[int]


class TapedStep(Protocol):
    """Replica's step, as its tape's gradients need it: a `MirroredReplicaStep`."""

    @property
    def graph(self) -> tf.Graph: ...

    @property
    def rank(self) -> int: ...

    @property
    def replicas(self) -> int: ...

    @property
    def has_batch_fraction(self) -> bool: ...

    def scale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor: ...

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor: ...

    def zero_if_empty(self, tensors: list[Any]) -> list[Any]: ...


def _record_sum(call: stand_ins.TapeCall, step: TapedStep) -> None:
    """Tells outer tapes that a call's gradients are the sums of all replicas' parts.

    A gradient of them, as of their norm, has to go back to the parts of all replicas. What comes
    back are parts in turn: those of a mean count by the replica's rows.
    """
    if not call.parts or not record.could_possibly_record():
        return
    in_rows = [isinstance(part, tf.IndexedSlices) for part in call.parts]
    given = [one for one in call.given if one is not None]
    parts, totals = numbers_of(call.parts), numbers_of(given)

    def sums(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if call.is_eager and call.is_open:
            _refuse_eager_use(len(tensors))
        graph = ops.get_default_graph()
        loops = [stand_ins.loops_around(one, step.graph) for one in (graph, call.graph) if one]
        if stand_ins.is_without_collectives(graph, step.graph) or loops[0] != loops[-1]:
            raise ValueError(
                "Gradients that were taken in a loop of the graph, or in what `tape.jacobian` "
                "vectorizes, do not go back to the rows of other replicas, as gradients of "
                "gradients do. Take them outside, or let Python turn: `for _ in range(4):`. "
                f"Received: gradients of those of {call.describe()}"
            )
        context = tf.distribute.get_replica_context()
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors)))

    def places(i: int) -> Any:
        """Places of a part's rows in the sum, after those of others or joined."""
        own, ids = call.parts[i].indices, given[i].indices
        (counts,) = sums([tf.one_hot(step.rank, step.replicas, tf.size(own), 0)])
        order = tf.argsort(ids)
        joined = tf.gather(order, tf.searchsorted(tf.gather(ids, order), own))
        in_turn = tf.reduce_sum(counts[: step.rank]) + tf.range(tf.size(own))
        return tf.where(tf.equal(tf.size(ids), tf.reduce_sum(counts)), in_turn, joined)

    def of_all(tensors: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        there = [i for i, one in enumerate(tensors) if one is not None]
        found = dict(zip(there, sums([tensors[i] for i in there]))) if there else {}
        return [found.get(i) for i in range(len(tensors))]

    def backward(*grads: tf.Tensor | None) -> list[tf.Tensor | None]:
        found = of_all(grads)
        for i, total in enumerate(found):
            if in_rows[i] and total is not None:
                found[i] = tf.gather(total, places(i))
        return found

    def forward(*tangents: tf.Tensor | None) -> list[tf.Tensor | None]:
        own = list(tangents)
        for i, tangent in enumerate(tangents):
            if in_rows[i] and tangent is not None:
                rows = tf.shape(totals[i])[0]
                own[i] = tf.math.unsorted_segment_sum(tangent, places(i), rows)
        return of_all(own)

    record.record_operation(
        "SumOfGradients", totals, parts, backward_function=backward, forward_function=forward
    )


def _refuse_eager_use(count: int) -> NoReturn:
    raise ValueError(
        "With `run_eagerly=True` and `compression` or `updates`, a `train_step` gives what "
        "`tape.gradient` returns to the optimizer as it is: the sum over the replicas "
        "cannot be put in its place. Use `run_eagerly=False`. "
        f"Received: {count} gradient(s) that the tape has not returned"
    )


class SummingEngine(Protocol):
    """Engine that sums the gradients of its replicas: an `AllReduceEngine`."""

    @property
    def sums_eagerly(self) -> bool: ...

    def sum_parts(self, parts: Any, variables: Any, optimizer: Any) -> list[Any]: ...

    def on_padded_batch(self, batch: Any, padded: Any) -> None: ...


class TapeGradients:
    """The gradients that the tape has given in one replica's step.

    Args:
        sum_parts: Function of gradients, their Keras variables and an optimizer (None where there
            is none, or where its compressors cannot be used) that sums over the replicas.
        sums_eagerly: Whether eager gradients are summed at once. Otherwise compressors, or
            `updates=`, want the replicas' parts.
    """

    def __init__(
        self, step: TapedStep, sum_parts: Callable[..., Any], sums_eagerly: bool = True
    ) -> None:
        self._step, self._sum_parts, self._sums_eagerly = step, sum_parts, sums_eagerly
        self._calls: list[stand_ins.TapeCall] = []
        # Those that have left a loop, and are the replica's.
        self._of_loops: list[stand_ins.TapeCall] = []
        # Graphs of functions, branches and loops in which there are some of the calls.
        self._inner: list[tf.Graph] = []
        self._is_summing = False

    def note(
        self, grads: Sequence[Gradient | None], variables: Sequence[Any]
    ) -> list[Gradient | None]:
        """Stand-ins for the gradients of one call of the tape."""
        self.settle()
        with record.stop_recording():
            call = stand_ins.TapeCall(grads, variables)
            self._calls.append(call)
            if tf.executing_eagerly() and self._sums_eagerly:
                # Nothing can be put in a tensor's place later.
                self._sum(call)
        _record_sum(call, self._step)
        graph = call.graph
        if graph not in (None, self._step.graph, *self._inner):
            self._inner.append(graph)
            call_at_end(graph, lambda outputs: self._end_inner(graph, outputs))
        return call.given

    def is_of_batch(self, tensor: Any) -> bool:
        """Whether a tensor is surely computed of the global batch's gradients alone."""
        if not self._calls or not isinstance(tensor, tf.Tensor):
            return False
        return stand_ins.is_made_of(self._calls, tensor) or any(
            tensor is one for call in self._calls if call.is_eager for one in call.given
        )

    def settle(self) -> None:
        """Sums what something has used by now; before collectives, and at the step's end."""
        if self._is_summing or tf.executing_eagerly():
            return
        for call in self._calls:
            if call.is_open and call.is_used() and not self._is_in_loop(call):
                self._sum(call)

    def _end_inner(self, graph: tf.Graph, outputs: Sequence[tf.Tensor]) -> None:
        """Settles what the trace of a function, a branch or a loop's body leaves behind."""
        for call in self._calls:
            if call.is_open and call.graph is graph and call.is_used(outputs):
                if self._is_in_loop(call):
                    unscale = self._step.unscale_by_batch_fraction
                    call.close([map_values(unscale, call.parts[i]) for i in call.left])
                    self._of_loops.append(call)
                else:
                    self._sum(call)

    def _is_in_loop(self, call: stand_ins.TapeCall) -> bool:
        return bool(stand_ins.loops_around(call.graph, self._step.graph))

    def _check_loops(self, gradient: Gradient) -> None:
        """Refuses what is not linear in gradients that were taken, and left, in a loop."""
        for call in self._of_loops:
            bodies = stand_ins.loops_around(call.graph, self._step.graph)
            used_by = bodies and stand_ins.nonlinear_use(gradient, bodies, call.variables)
            if used_by:
                raise ValueError(
                    "Gradients that were taken in a loop of the graph are each replica's own when "
                    "they leave it, and the step computes with them what is no mean, such as a "
                    "norm. Clip and apply them in the loop, or make it a loop of Python's, as "
                    "`for _ in range(4):` is. "
                    f"Received: {used_by} of the gradients of {call.describe()}"
                )

    def take(
        self,
        grads: list[Gradient | None],
        optimizer: keras.optimizers.Optimizer | None,
        wants_parts: bool = False,
    ) -> Summed:
        """Resolves an optimizer's gradients to replicas' parts or global sums."""
        grads = [
            tf.convert_to_tensor(g) if isinstance(g, (Variable, tf.Variable)) else g for g in grads
        ]
        if tf.executing_eagerly():
            return self._take_eagerly(grads, wants_parts)
        for call in self._calls:
            if call.is_open and (call.is_used() or any(call.has_made(one) for one in grads)):
                self._sum(call, optimizer)
        summed = [call for call in self._calls if call not in self._of_loops]
        own: list[Gradient | None] = []
        whole: set[int] = set()
        for i, gradient in enumerate(grads):
            part = self._part_of(gradient)
            if part is None and gradient is not None:
                if stand_ins.is_made_of(summed, gradient, summed=True):
                    part, whole = gradient, whole | {i}
                else:
                    self._check_loops(gradient)
                    part = self._part_of_mean(gradient)
            own.append(part)
        return Summed(own, whole)

    def _take_eagerly(self, grads: Sequence[Gradient | None], wants_parts: bool) -> Summed:
        parts = [self._part_of(gradient) for gradient in grads]
        changed = [i for i, part in enumerate(parts) if part is None and grads[i] is not None]
        is_eager = any(call.is_eager for call in self._calls)
        if is_eager and changed and not self._sums_eagerly:
            _refuse_eager_use(len(changed))
        for i in changed:
            parts[i] = self._part_of_mean(grads[i])
        if wants_parts or not self._sums_eagerly or not is_eager:
            return Summed(parts, set())
        summed = [part if i in changed else g for i, (g, part) in enumerate(zip(grads, parts))]
        whole = {i for i, g in enumerate(grads) if g is not None and i not in changed}
        return Summed(summed, whole)

    def _part_of_mean(self, gradient: Gradient | None) -> Gradient | None:
        """A replica's part of the mean over the rows of all of them."""
        if not self._step.has_batch_fraction or self._step.replicas == 1:
            return gradient
        return map_values(self._step.scale_by_batch_fraction, gradient)

    def put_sums(self, variables: Sequence[Any], sums: Sequence[Gradient]) -> None:
        """Writes an optimizer's sums back to the stand-ins that it was called with."""
        for call in self._calls:
            if call.is_open:
                call.put_sums(variables, sums)

    def _part_of(self, gradient: Gradient | None) -> Gradient | None:
        """A replica's part, if a gradient is a stand-in for it that nothing has used."""
        for call in self._calls:
            if call.is_open or tf.executing_eagerly():
                part = call.part_of(gradient)
                if part is not None:
                    return part
        return None

    def _sum(
        self, call: stand_ins.TapeCall, optimizer: keras.optimizers.Optimizer | None = None
    ) -> None:
        outer, self._is_summing = self._is_summing, True
        try:
            with call.graph_context():
                parts = self._step.zero_if_empty([call.parts[i] for i in call.left])
                variables = [call.variables[i] for i in call.left]
                call.close(self._sum_parts(parts, variables, optimizer))
        finally:
            self._is_summing = outer


# One replica's run of one function, and the synchronization after it.
#
# A replica's gradients and means count by its fraction of the batch, `local_rows / global_rows`, so
# that their sum over the replicas is that of the global batch, also when the batch is uneven. After
# the function has run, everything that a replica changed by itself becomes one value on all of
# them: metric states are totals over all replicas, and non-trainable floats such as
# BatchNormalization's moving averages are means weighted by rows. All of it travels in one
# collective for each dtype.

_HOST = "CPU:0"


class MirroredReplicaStep(ReplicaStep):
    """Context of one replica's run of one function.

    Attributes:
        recording: Whether it notes which variables the replica changes by itself.
        alone: Whether gradients are the replica's own, to be applied as they are.
        sums: The engine, as what sums gradients.
        is_eager: Whether it is run, and not traced.
        has_pushed: Whether it has sent gradients to parameter servers since all replicas met.
        passed_barrier: Whether all replicas have passed its barrier.
    """

    can_sum = True

    def __init__(
        self,
        engine: Engine,
        extended: MultiWorkerMirroredExtended,
        batch: batches.Batch | None = None,
    ) -> None:
        super().__init__(engine)
        self._extended = extended
        self.graph, self.is_eager = ops.get_default_graph(), tf.executing_eagerly()
        self.sums = cast(SummingEngine, engine)
        self.tape = TapeGradients(self, self.sums.sum_parts, self.sums.sums_eagerly)
        # Variables whose gradients an optimizer is given as those of the global batch, by ids.
        self.whole: frozenset[int] = frozenset()
        # Whether the sums that an optimizer makes are those of what the tape gave.
        self.writes_back_sums = False
        self.rank = extended.rank_in_context()
        self.replicas = extended._num_replicas_in_sync
        self._fraction: Any = None
        self._rows: Any = None
        # None if nobody has said how many.
        self._local_rows: Any = None
        self._surely_has_rows = False
        self._changed: dict[Any, tf.Variable] = {}
        self._baselines: dict[Any, tuple[tf.Variable, tf.Tensor]] = {}
        self.touched: set[Any] = set()
        self.recording = True
        self.alone = self.has_pushed = self.passed_barrier = False
        # Metrics whose results the step has asked for eagerly, by ids.
        self.asked_metrics: set[int] = set()
        if batch is not None:
            self.set_batch_fraction(*batch.counts())
            # A padded batch has one row.
            rows = batches.rows_of(batch.data)
            self._surely_has_rows = isinstance(rows, int) and rows > 1

    @property
    def has_batch_fraction(self) -> bool:
        return self._fraction is not None

    def is_of_batch(self, target: Any) -> bool:
        return self.tape.is_of_batch(target)

    def set_batch_fraction(self, local_rows: tf.Tensor, global_rows: tf.Tensor) -> None:
        self.set_rows(local_rows)
        global_rows = tf.cast(global_rows, tf.float32)
        # Variables, not tensors: a nested tf.function that was traced in an earlier step's graph
        # reads this step's values.
        self._fraction = self._extended.step_variable("share")
        self._fraction.assign(
            tf.cast(local_rows, tf.float32) / tf.maximum(global_rows, 1.0), read_value=False
        )
        self._rows = self._extended.step_variable("global rows")
        self._rows.assign(global_rows, read_value=False)

    def set_rows(self, local_rows: int | tf.Tensor) -> None:
        """Notes the replica's rows, where nothing depends on those of the others."""
        self._local_rows = self._extended.step_variable("local rows", on_host=True)
        with ops.device(_HOST):
            self._local_rows.assign(tf.cast(local_rows, tf.float32), read_value=False)

    @property
    def may_be_empty(self) -> bool:
        """Whether the replica may have no rows, as far as the graph knows."""
        # A tf.function inside may be called again where that is not so.
        knows = self._surely_has_rows and ops.get_default_graph() is self.graph
        return self._local_rows is not None and not knows

    def has_rows(self) -> tf.Tensor:
        """Scalar bool on the host, whether the replica has its own rows."""
        with ops.device(_HOST):
            rows = self._local_rows
            return tf.constant(True) if rows is None else rows.read_value() > 0

    @contextlib.contextmanager
    def applying_alone(self) -> Iterator[None]:
        """Context in which optimizers apply the replica's gradients as they are given them."""
        alone, recording = self.alone, self.recording
        self.alone, self.recording = True, False
        try:
            yield
        finally:
            self.alone, self.recording = alone, recording

    def rows(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of the replica and of the global batch; `(fraction, 1)` if unknown."""
        everything = tf.constant(1.0) if self._rows is None else self._rows.read_value()
        return self.batch_fraction() * everything, everything

    def agree_on_batch_fraction(self, rows: int | tf.Tensor) -> None:
        """Computes the replica's fraction of the global batch from the rows of all replicas."""
        rows = tf.cast(rows, tf.float32)
        self.set_batch_fraction(rows, self._extended.sum_over_replicas([rows])[0])

    def result_of(self, metric: keras.metrics.Metric, result: Callable[..., Any]) -> Any:
        # A computation with the result, in the step, cannot be made once more.
        eager = tf.executing_eagerly()
        return functools.partial(self._global_result, metric, result) if eager else result

    def _global_result(
        self, metric: keras.metrics.Metric, result: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a metric's `result` in an eager step, with the states of all replicas."""
        if tf.executing_eagerly() and self is current_step() and self.has_batch_fraction:
            self.asked_metrics.add(id(metric))
            self.synchronise_totals([variable._value for variable in metric.variables])
        return result(*args, **kwargs)

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        """Divides by the replica's fraction of the batch; zero if it has no rows."""
        return tf.math.divide_no_nan(value, tf.cast(self.batch_fraction(), value.dtype))

    def zero_if_empty(self, tensors: list[Any]) -> list[Any]:
        """Replaces tensors of a replica without rows, which may be NaN, by zeros.

        Args:
            tensors: List of tensors, `tf.IndexedSlices` or None. Of slices, none are left.
        """
        if self._local_rows is None:
            return tensors
        # Also where the graph knows that there are rows: others may not, and all replicas have to
        # find the same products.
        none = _of_no_rows if self.may_be_empty else _zeros
        kept = [i for i, tensor in enumerate(tensors) if tensor is not None]
        parts = [self._parts_of(tensors[i]) for i in kept]
        # A cond passes tensors through without a copy, and each as soon as it is there.
        parts = tf.cond(
            has_rows := self.has_rows(),
            lambda: tf.nest.map_structure(tf.identity, parts),
            lambda: [none(part, has_rows) for part in parts],
        )
        tensors = list(tensors)
        for i, part in zip(kept, parts):
            if isinstance(part, outer_products.OuterProduct):
                part = part.whole()
            elif isinstance(tensors[i], tf.IndexedSlices):
                (values,), old = part, tensors[i]
                indices = old.indices
                if self.may_be_empty:
                    indices = indices[: tf.shape(values)[0]]
                part = tf.IndexedSlices(values, indices, old.dense_shape)
            tensors[i] = part
        return tensors

    def rows_if_any(self, tensor: Any) -> Any:
        """Rows of a tensor that a replica has computed; none if the replica has none."""
        if not self.may_be_empty:
            return tensor
        if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
            return batches.take(tensor, 0, self._or_none(batches.rows_of(tensor)))
        return tensor[: self._or_none(tf.shape(tensor)[0])]

    def _or_none(self, rows: int | tf.Tensor | None) -> tf.Tensor:
        """A number of rows, or 0 if the replica has none, on the host."""
        with ops.device(_HOST):
            return tf.where(self.has_rows(), rows, 0)

    def _parts_of(self, gradient: tf.Tensor | tf.IndexedSlices) -> Any:
        """Components of a gradient: the values of slices, the factors of a product."""
        if isinstance(gradient, tf.IndexedSlices):
            return [gradient.values]
        product = None
        if self._extended.reducers.takes_products:
            # Perhaps nobody needs it whole.
            product = outer_products.find_outer_product(gradient)
        return gradient if product is None or gradient.consumers() else product

    def sum_over_replicas(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Sums small tensors over all replicas; what those without rows have computed is 0."""
        self.tape.settle()
        tensors = self.zero_if_empty(list(tensors)) if self.may_be_empty else tensors
        return self._extended.sum_over_replicas(tensors)

    def sum_over_group(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Sums small tensors over the replicas of this one's group in a topology."""
        return self._extended.sum_over_group(tensors)

    def batch_fraction(self) -> tf.Tensor:
        if self._fraction is None:
            return tf.constant(1.0 / self.replicas)
        return self._fraction.read_value()

    def note_baselines(self, variables: Iterable[tf.Variable]) -> None:
        """Reads accumulated totals before the function adds this replica's part to them."""
        for variable in variables:
            if variable.ref() not in self._baselines:
                # In the step's own graph, also when the first assignment is inside a tf.cond.
                eager = tf.executing_eagerly()
                with contextlib.nullcontext() if eager else self.graph.as_default():
                    value = own_copy(variable).read_value()
                self._baselines[variable.ref()] = (variable, value)

    def record_total(self, variable: tf.Variable) -> None:
        """Notes that the replica is about to add its part to an accumulated total."""
        self.note_baselines([variable])
        self.touched.add(variable.ref())

    def record(self, variable: tf.Variable) -> None:
        """Notes that the replica changed a variable by itself."""
        self._changed[variable.ref()] = variable

    @property
    def changed(self) -> list[tf.Variable]:
        return list(self._changed.values())

    @property
    def totals(self) -> list[tf.Variable]:
        """Accumulated totals, which the replica may have added its part to."""
        return [variable for variable, _ in self._baselines.values()]

    def synchronise(
        self,
        means: Sequence[tf.Variable] = (),
        tensors: Sequence[tf.Tensor] = (),
        reads: Sequence[tuple[tf.Variable, tf.Tensor]] = (),
    ) -> list[tf.Tensor]:
        """Makes totals and means global.

        Args:
            means: Variables to set to their mean over all replicas, weighted by rows.
            tensors: Float tensors of static shape to average in the same way.
            reads: Pairs of one of `totals` and what the step has read of it.

        Returns:
            The averaged `tensors`, then of each read what one process would have read.
        """
        fraction = self.batch_fraction()

        def unless_empty(value: tf.Tensor) -> tf.Tensor:
            # Results of an empty replica may be NaN.
            return tf.where(fraction > 0, value, tf.zeros_like(value))

        def weighted(value: tf.Tensor) -> tf.Tensor:
            return unless_empty(value * tf.cast(fraction, value.dtype))

        totals = list(self._baselines.values())
        bases = [self._baselines[variable.ref()][1] for variable, _ in reads]
        parts = [unless_empty(added(own_copy(v).read_value(), base)) for v, base in totals]
        parts += [unless_empty(added(value, base)) for (_, value), base in zip(reads, bases)]
        parts += [weighted(own_copy(variable).read_value()) for variable in means]
        parts += [weighted(tensor) for tensor in tensors]
        # Also of what is logged as it is.
        self.tape.settle()
        barrier = self._extended.barrier
        meets = barrier is not None and bool(parts or self.has_pushed or not self.passed_barrier)
        if meets:
            parts.append(barrier.token())
        sums = self._extended.sum_over_replicas(parts)
        if meets:
            barrier.release(sums.pop())
            self.passed_barrier, self.has_pushed = True, False
        for (variable, base), total in zip(totals, sums):
            own_copy(variable).assign(base + total, read_value=False)
        of_reads = [base + total for base, total in zip(bases, sums[len(totals) :])]
        averages = sums[len(totals) + len(reads) :]
        for variable, average in zip(means, averages):
            own_copy(variable).assign(average, read_value=False)
        self._baselines.clear()
        self._changed.clear()
        return averages[len(means) :] + of_reads

    def average(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Means of floats over all replicas, weighted by rows."""
        fraction = self.batch_fraction()
        return self._extended.sum_over_replicas(
            [tf.where(fraction > 0, t * tf.cast(fraction, t.dtype), 0) for t in tensors]
        )

    def synchronise_totals(self, variables: Iterable[tf.Variable]) -> None:
        """Makes some totals global in the middle of a step that runs eagerly."""
        known = [v for v in variables if v.ref() in self._baselines]
        has_rows = self.batch_fraction() > 0
        parts = [added(own_copy(v).read_value(), self._baselines[v.ref()][1]) for v in known]
        parts = [tf.where(has_rows, part, tf.zeros_like(part)) for part in parts]
        for variable, total in zip(known, self._extended.sum_over_replicas(parts)):
            value = self._baselines[variable.ref()][1] + total
            own_copy(variable).assign(value, read_value=False)
            self._baselines[variable.ref()] = variable, value


def _of_no_rows(part: Any, has_rows: tf.Tensor) -> Any:
    """Equivalent of a gradient's component on a replica without rows."""
    if isinstance(part, (list, outer_products.OuterProduct)):
        return tf.nest.map_structure(lambda tensor: tensor[:0], part)
    return _zeros(part, has_rows)


def _zeros(part: Any, has_rows: tf.Tensor) -> Any:
    def zeros(tensor: tf.Tensor) -> tf.Tensor:
        # It is False here. Constants would take as much memory as the model, in all steps;
        # `zeros_like` would have each gradient pass through one more function.
        with ops.device(_HOST):
            zero = tf.cast(has_rows, tensor.dtype)
        return tf.fill(tf.shape(tensor), zero)

    return tf.nest.map_structure(zeros, part)
