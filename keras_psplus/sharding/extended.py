"""Implementation half of all-reduce with the optimizer's state in shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Hop, Route
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.all_reduce.topology.group_topology import (
    Levels,
    Topology,
    keys_of,
    levels_of,
    ranks_by_place,
)
from keras_psplus.sharding.store import ShareStore
from keras_psplus.sharding.variable import ShareVariable, TensorVariable

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.compression import Compressor


class ShardedExtended(MultiWorkerMirroredExtended):
    """Additional APIs of a strategy with `shard=`."""

    _store: ShareStore | None = None
    _groups: Levels | None = None
    _order: list[int] | None = None

    def __init__(
        self, *args: Any, weights: Compressor | None = None, group_size: int | None = None
    ) -> None:
        self._of_weights = weights
        super().__init__(*args)
        if group_size is not None and group_size < self._num_workers:
            ranks = range(self._num_workers)
            groups = [tuple(ranks[i : i + group_size]) for i in ranks[::group_size]]
            topology = Topology(tuple(groups))
            key = self.take_group_keys(keys_of(topology))
            self._groups = levels_of(self.launcher(0), self._id_in_cluster, topology, key)

    def set_topology(self, topology: Topology | str) -> None:
        super().set_topology(topology)
        self._order = None
        if isinstance(topology, Topology) and self.levels:
            self._order = ranks_by_place(topology)

    @property
    def compressors(self) -> tuple[Compressor | None, Compressor | None]:
        """Compressors of gradients, and of what is gathered of weights."""
        return self._hops.between, self._of_weights

    @property
    def _keeps_state(self) -> bool:
        return self._of_weights is not None or super()._keeps_state

    @property
    def store(self) -> ShareStore:
        if self._store is None:
            assert self.control is not None
            self._store = ShareStore(
                self._make_store_route(),
                self.host_launcher,
                self.take_group_keys(1 + self._num_workers),
                self.control,
                self._id_in_cluster,
                self._container_strategy().progress,
                self.sharing_workers,
            )
        return self._store

    @property
    def sharing_workers(self) -> Sequence[int]:
        """Ranks of the workers that have parts of one variable, in their order."""
        if self._groups:
            return self._groups.within.ranks
        return self._order or range(self._num_workers)

    @property
    def places(self) -> list[int]:
        """Place of each worker, in rank order, among those that share a variable with it."""
        # Groups that share are of consecutive ranks.
        order = self._order or range(len(self.sharing_workers))
        return [order.index(rank % len(order)) for rank in range(self._num_workers)]

    @property
    def sharing_launcher(self) -> Launcher:
        return self._groups.within.launcher if self._groups else self.launcher(0)

    @property
    def route(self) -> Route:
        if self._order and self.levels:
            within, between, *_ = self.levels[0]
            return Route(between, within)
        workers = self.sharing_workers
        place = workers.index(self._id_in_cluster)
        return Route(Hop(self.sharing_launcher, workers, place))

    def _make_store_route(self) -> Route:
        """Makes the way of rows between all workers that have parts of one variable."""
        return self.route

    @property
    def between_groups(self) -> Hop | None:
        """The workers that have the same parts, one of each group, or None."""
        return self._groups and self._groups.between

    def has_made(self, variable: Any) -> bool:
        return isinstance(variable, ShareVariable) or super().has_made(variable)

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[Any]:
        if isinstance(colocate_with_variable, ShareVariable):
            # Sums of `gradient_accumulation_steps` are mirrored.
            return contextlib.nullcontext()
        return super().colocate_vars_with(colocate_with_variable)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        if isinstance(var, (TensorVariable, ShareVariable)):
            return fn(var, *args, **(kwargs or {}))
        return super().update(var, fn, args, kwargs, group)

    def share(
        self, variable: keras.Variable, initial: Any, make: Callable[[], ShareVariable]
    ) -> None:
        """Leaves to each worker its part of the initial value that the chief has.

        Args:
            initial: Its initial value, or a function that returns it; on the chief, not None.
        """
        with tf.device(self.store.device):
            value = initial() if callable(initial) else initial
            if variable._shape is None:
                # Keras takes it from the value, later.
                variable._shape = tuple(value.shape)
            value = tf.cast(value, variable._dtype) if self._is_chief else None
            weight = make()
            weight.receive(self.host_launcher, value)
        variable._value = weight
        weight.release_with(variable)

    def broadcast(self, variables: Sequence[Any]) -> None:
        # Variables in shares have come to all workers when the chief has read them.
        super().broadcast([v for v in variables if not isinstance(v, ShareVariable)])
