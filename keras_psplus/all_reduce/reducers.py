"""One sum of gradients for each optimizer and local replica, and what they keep."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Hop
from keras_psplus.all_reduce.reduction.exchange import GradientSum, RingSum, TwoLevelSum
from keras_psplus.all_reduce.topology.group_topology import Hops
from keras_psplus.communication import Communication
from keras_psplus.compression import methods
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.variables import gradient_shape
from keras_psplus.tf_internals import distribute_utils
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.reduction.replica_states import MirroredState, ReplicaStates
    from keras_psplus.all_reduce.topology.group_topology import Levels
    from keras_psplus.engine import Engine


class GradientReducer:
    """Sums gradients in replica context; what is kept belongs to the optimizer they are for.

    Args:
        launchers: `operations.Launcher` of each local replica.
        hops: `group_topology.Hops`, the compressors with error feedback where it is wanted.
        levels: `group_topology.Levels` of each local replica; None for one ring of all replicas.
    """

    def __init__(
        self,
        launchers: Sequence[Launcher],
        first_rank: int,
        replicas: int,
        hops: Hops,
        bucket_bytes: int,
        levels: Sequence[Levels] | None,
        state: MirroredState,
    ) -> None:
        self._launchers, self._first_rank = launchers, first_rank
        self._replicas, self._hops, self._bucket_bytes = replicas, hops, bucket_bytes
        self._levels, self._state = levels, state
        self._of_owner = weakref.WeakKeyDictionary[Any, dict[str, list[Any]]]()
        self._eager = weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]]()
        self.communication = Communication()

    @property
    def compresses(self) -> bool:
        return any(compressor is not None for compressor in self._hops)

    @functools.cached_property
    def takes_products(self) -> bool:
        """Whether a compressor may take the factors of a gradient that is a product."""
        chosen = [one for compressor in self._hops for one in methods.each(compressor)]
        # One that has a choice of its own may choose any.
        return any(not methods.missing(c, n) for c in chosen for n in ("factored", "for_variable"))

    def sum(
        self,
        grads: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
        step: tf.Tensor,
        owner: Any,
        kind: str = "gradient",
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums gradients, in replica context.

        Args:
            grads: List of tensors of static shapes or `tf.IndexedSlices`.
            variables: Their variables, with a `path` and a `shape`.
            step: int64 scalar, the same on all replicas.
            owner: Object that residuals live as long as: the optimizer.
            kind: `"gradient"`; `"change"` for what weights have changed by, with residuals of its
                own; `"group"` for sums over the replica's group alone; or `"copy"`, which is not
                compressed.
        """
        context = tf.distribute.get_replica_context()
        if tf.executing_eagerly():
            # Eager replicas run one after the other: only a merge_call lets all of them take part.
            merged = functools.partial(self._merged, variables=variables, owner=owner, kind=kind)
            return context.merge_call(merged, (list(grads), step))
        return self._sum(context._replica_id, grads, variables, step, owner, kind)

    def _merged(
        self,
        strategy: tf.distribute.Strategy,
        grads: Any,
        step: tf.Tensor,
        variables: Sequence[Any],
        owner: Any,
        kind: str,
    ) -> list[Any]:
        local = strategy.experimental_local_results
        by_replica = [
            [local(gradient)[i] for gradient in grads] for i in range(len(self._launchers))
        ]
        functions = self._eager.setdefault(owner, {})
        # Not by their paths, which others may have as well; the function keeps them alive.
        key = kind, *map(id, variables)
        if key not in functions:
            own = weakref.ref(owner)

            def sum_all(by_replica: Sequence[Sequence[Any]], step: tf.Tensor) -> list[list[Any]]:
                return [
                    self._sum(i, grads, variables, step, own(), kind)
                    for i, grads in enumerate(by_replica)
                ]

            # AutoGraph would take seconds to find that nothing here branches on tensors.
            functions[key] = tf.function(sum_all, autograph=False)
        summed = functions[key](by_replica, local(step)[0])
        return [distribute_utils.regroup(tuple(replicas)) for replicas in zip(*summed)]

    def sum_parts(
        self,
        parts: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
        optimizer: Any,
        engine: Engine,
        largest: Callable[[list[Any]], list[Any]],
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums replicas' parts of gradients, by an optimizer's compressors if there is one.

        Args:
            parts: List of tensors or `tf.IndexedSlices`, in replica context.
            variables: Their variables, Keras's or TensorFlow's.
            optimizer: The optimizer, or None for sums without a compressor.
            engine: Owner of what is not compressed.
            largest: Function of gradients that overwrite their variables.
        """
        variables = [_with_path(variable) for variable in variables]
        sums = [with_shape(g, v) for g, v in zip(parts, variables)]
        # A row that came twice stays so, as in one process: the step may take norms of rows.
        copied = [
            i for i, g in enumerate(sums) if optimizer is None or isinstance(g, tf.IndexedSlices)
        ]
        others = [i for i in range(len(sums)) if i not in copied]
        kept = [i for i in range(len(sums)) if is_overwritten(variables[i])]
        for i, value in zip(kept, largest([sums[i] for i in kept])):
            sums[i] = value
        copied, others = ([i for i in one if i not in kept] for one in (copied, others))
        for numbers, owner, kind in ((copied, engine, "copy"), (others, optimizer, "gradient")):
            if numbers:
                step = 0 if optimizer is None else tf.convert_to_tensor(optimizer.iterations)
                chosen = [sums[i] for i in numbers], [variables[i] for i in numbers]
                found = self.sum(*chosen, tf.cast(step, tf.int64), owner, kind)
                for i, total in zip(numbers, found):
                    sums[i] = total
        return sums

    def sum_on(
        self,
        replica: int,
        grads: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
        step: tf.Tensor,
        owner: Any,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Equivalent of `sum` for a local replica, outside of replica context.

        `replica` is its number on this worker.
        """
        return self._sum(replica, grads, variables, step, owner, "gradient")

    def _sum(
        self,
        replica: int,
        grads: Sequence[Any],
        variables: Sequence[Any],
        step: tf.Tensor,
        owner: Any,
        kind: str,
    ) -> list[Any]:
        with ops.device(self._launchers[replica]._device):
            grads = list(grads)
            in_rows = [i for i, one in enumerate(grads) if isinstance(one, tf.IndexedSlices)]
            # As they are in one process, of the rows of all replicas.
            joins = [
                duplicate_rows.whole_of(g) if i in in_rows else None for i, g in enumerate(grads)
            ]
            for i in in_rows:
                grads[i] = duplicate_rows.summed_for(owner, grads[i])
            return self._sums(owner, kind)[replica](grads, variables, step, joins)

    def _sums(self, owner: Any, kind: str) -> list[GradientSum]:
        of_owner = self._of_owner.setdefault(owner, {})
        if kind not in of_owner:
            # Replicas of one graph would wait for each other's clocks, and so for ever: TensorFlow
            # keeps stateful operations in order.
            timed = len(self._launchers) == 1
            sums = [
                self._make_sum(i, kind, timed, states.within(kind))
                for i, states in enumerate(self._state.states_of(owner))
            ]
            of_owner[kind] = sums
            # That of one replica stands for all: each sends the same. It outlives the optimizer,
            # as totals are of all that was ever sent.
            traffic_variables = sums[0].traffic_variables
            self.communication.add_source(
                traffic_variables.traffic, lambda: traffic_variables.seconds
            )
        return of_owner[kind]

    def _make_sum(self, replica: int, kind: str, timed: bool, states: ReplicaStates) -> GradientSum:
        size = self._bucket_bytes
        hops = Hops(None, None) if kind == "copy" else self._hops
        ring = Hop(self._launchers[replica], range(self._replicas), self._first_rank + replica)
        if self._levels is None:
            return RingSum(ring, hops.between, size, timed, states)
        levels = self._levels[replica]
        if kind == "group":
            compressor = hops.within if levels.within.size > 1 else None
            return RingSum(levels.within, compressor, size, timed, states)
        return TwoLevelSum(ring, levels, hops, size, timed, states)


def with_shape(gradient: Any, variable: Any) -> Any:
    """A gradient with its variable's shape: some reach us without a static one."""
    shape = gradient_shape(variable)
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.ensure_shape(gradient.values, [None, *shape[1:]])
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.ensure_shape(gradient, shape)


def is_overwritten(variable: Any) -> bool:
    """Whether a variable takes its gradient's value, as scales of float8 do."""
    return getattr(variable, "overwrite_with_gradient", False)


class _Path(NamedTuple):
    """Path of a TensorFlow variable, as needed to sum its gradients."""

    path: str
    shape: Any


def _with_path(variable: Any) -> Any:
    return variable if hasattr(variable, "path") else _Path(variable.name, variable.shape)
