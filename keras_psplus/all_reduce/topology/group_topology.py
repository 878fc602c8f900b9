"""Topologies of an all-reduce: one ring, or groups of workers with fast links."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Hop
from keras_psplus.all_reduce.collectives.operations import Launcher
from keras_psplus.all_reduce.reduction.methods import compressor_of
from keras_psplus.arguments import shown
from keras_psplus.compression import Compressor, methods
from keras_psplus.tf_internals import distribute_utils

FLAT, AUTO = "flat", "auto"
_ALLOWED = (
    '`topology` must be None or "flat", "auto", or a list of groups of workers, such as '
    '[["worker-0", "worker-1"], ["worker-2", "worker-3"]]'
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Groups of workers, with fast links inside and slow links between them."""

    groups: tuple[tuple[int, ...], ...]

    def of_replicas(self, local: int) -> Topology:
        """The groups of replicas' ranks, with as many replicas on each worker."""
        return Topology(
            tuple(
                tuple(worker * local + i for worker in group for i in range(local))
                for group in self.groups
            )
        )

    def group_of(self, rank: int) -> int:
        return next(i for i, group in enumerate(self.groups) if rank in group)

    @property
    def is_even(self) -> bool:
        """Whether all groups are of one size."""
        return len({len(group) for group in self.groups}) == 1

    @property
    def has_levels(self) -> bool:
        """Whether there is a hop inside a group and one between groups."""
        return len(self.groups) > 1 and any(len(group) > 1 for group in self.groups)

    def describe(self, names: Sequence[str]) -> str:
        """The groups in one line, by the workers' names."""
        return " | ".join(" ".join(names[i] for i in group) for group in self.groups)


def get(topology: Any, names: Sequence[str] | None) -> Topology | str:
    """Checks what a user gives as `topology`.

    Args:
        topology: None, `"flat"`, `"auto"`, or groups of workers' names or numbers.
        names: Names of all workers, in rank order; None without a cluster, whose groups then
            stand for what there is.

    Returns:
        `"flat"`, `"auto"`, or a `Topology` with the groups in rank order.
    """
    if topology is None:
        return FLAT
    if isinstance(topology, str) and topology in (FLAT, AUTO):
        return topology
    if not _is_list(topology) or not topology or not all(map(_is_list, topology)):
        raise ValueError(f"{_ALLOWED}. Received: topology={shown(topology)}")
    if names is None:
        return AUTO
    groups = [[_number(worker, names, topology) for worker in group] for group in topology]
    known = f"The cluster's workers are {', '.join(names)}"
    if not all(groups):
        raise ValueError(
            f"each group of `topology` must have a worker. Received: topology={shown(topology)}"
        )
    everyone = [worker for group in groups for worker in group]
    for worker in everyone:
        if everyone.count(worker) > 1:
            raise ValueError(
                f"each worker must be in one group of `topology`, once; {names[worker]} is there "
                f"{everyone.count(worker)} times. {known}. Received: topology={shown(topology)}"
            )
    missing = [name for i, name in enumerate(names) if i not in everyone]
    if missing:
        raise ValueError(
            f"each worker must be in one group of `topology`; {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} in none. {known}. "
            f"Received: topology={shown(topology)}"
        )
    found = Topology(tuple(sorted(tuple(sorted(group)) for group in groups)))
    if not found.is_even:
        raise ValueError(
            "groups of `topology` must be of one size: workers that have the same place in their "
            "groups exchange sums between groups, and here some would have nobody to. Make groups "
            "of as many workers each, or leave `topology` out for one ring. "
            f"Received: topology={shown(topology)}"
        )
    return found


def _number(worker: Any, names: Sequence[str], topology: Any) -> int:
    if isinstance(worker, int) and not isinstance(worker, bool) and 0 <= worker < len(names):
        return worker
    if isinstance(worker, str) and worker in names:
        return list(names).index(worker)
    raise ValueError(
        f"groups of `topology` must be of the cluster's workers, {', '.join(names)}, or of their "
        f"numbers from 0 to {len(names) - 1}; {shown(worker)} is none. "
        f"Received: topology={shown(topology)}"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


# Compressors of a topology's hops: one inside groups, one between them.

WITHIN, BETWEEN = "within", "between"


class Hops(NamedTuple):
    """Compressors of a topology's hops, with error feedback where they ask for it.

    Attributes:
        within: Of the hop inside groups, or None.
        between: Of the hop between groups, or None. Without groups, of the one way that there is.
    """

    within: Compressor | None
    between: Compressor | None

    def collapse_to_ring(self, topology: Topology | str) -> Hops:
        """Compressors for a single ring.

        They are those between groups, or inside if the topology is one group.
        """
        is_one = isinstance(topology, Topology) and len(topology.groups) == 1
        return Hops(None, self.within if is_one else self.between)


def compressors_per_hop(compression: Any, topology: Topology | str) -> Hops:
    """Makes the compressors of a strategy.

    Args:
        compression: What a user gives: one value for the hop between groups, or a dict with
            `"within"` and `"between"`.
    """
    named = set(compression) & {WITHIN, BETWEEN} if isinstance(compression, dict) else set()
    if not named:
        hops = Hops(None, compressor_of(compression))
    elif len(named) < len(compression):
        raise ValueError(
            'a dict with "within" or "between" must have no other keys; patterns of variables\' '
            "paths belong into the dict of a hop, as in "
            '{"between": {"*kernel": "int8"}}. '
            f"Received: compression={shown(compression)}"
        )
    else:
        hops = Hops(*(compressor_of(compression.get(hop)) for hop in (WITHIN, BETWEEN)))
    if topology == AUTO:
        _check_within(hops.within, compression)
        return _check_factors(hops, compression)
    if not isinstance(topology, Topology):
        if named:
            raise ValueError(
                '"within" and "between" are the hops of a topology with groups; without one, give '
                "`compression` the compressor itself. "
                f"Received: compression={shown(compression)}, topology={shown(topology)}"
            )
        return hops
    for hop, compressor, is_there in (
        (WITHIN, hops.within, any(len(group) > 1 for group in topology.groups)),
        (BETWEEN, hops.between, len(topology.groups) > 1),
    ):
        if compressor is not None and not is_there:
            lacks = "more than one group" if hop == BETWEEN else "a group of several workers"
            raise ValueError(
                f'there is no hop "{hop}" in a topology without {lacks}. '
                f"Received: compression={shown(compression)}, topology={topology.groups}"
            )
    _check_within(hops.within, compression)
    return _check_factors(hops, compression)


def _check_within(compressor: Compressor | None, compression: Any) -> None:
    """Raises ValueError if a compressor inside groups cannot encode piece by piece."""
    if compressor is not None and not compressor.supports_reduce_scatter:
        raise ValueError(
            'inside groups gradients can be sent by "bf16", "fp16", "int8", "sign", or a '
            "compressor that `supports_reduce_scatter`: each replica sums one piece. "
            f"Received: compression={shown(compression)}"
        )


def _check_factors(hops: Hops, compression: Any) -> Hops:
    if any(compressor.gathers_factors for compressor in methods.each(hops.between)):
        raise ValueError(
            '"factors" of gradients are gathered by all workers along one ring, and cannot cross a '
            "hop of a topology: leave `topology` out, or give another `compression`. "
            f"Received: compression={shown(compression)}"
        )
    return hops


# Collectives of a topology's two hops, as one replica sees them.


class Levels(NamedTuple):
    """The two hops of one replica.

    Attributes:
        within: The hop inside its group.
        between: The hop to those of its place in the other groups, which have the same shard.
        next_is_outside: Whether the next replica in a ring of all belongs to another group.
    """

    within: Hop
    between: Hop
    next_is_outside: bool


def levels_of(launcher: Launcher, rank: int, topology: Topology, first_key: int) -> Levels:
    """Makes the two hops of a replica."""
    number = topology.group_of(rank)
    group = topology.groups[number]
    place = group.index(rank)
    within = Hop(launcher.like(first_key + number, group), group, place)
    peers = tuple(sorted(group[place] for group in topology.groups))
    own = launcher.like(first_key + len(topology.groups) + place, peers)
    between = Hop(own, peers, peers.index(rank))
    after = (rank + 1) % sum(map(len, topology.groups))
    return Levels(within, between, topology.group_of(after) != number)


def keys_of(topology: Topology) -> int:
    """Number of group keys that `levels_of` needs."""
    return len(topology.groups) + len(topology.groups[0])


def sum_over_group(levels: Sequence[Levels], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums small tensors over the replicas of this one's group, in replica context."""
    context = tf.distribute.get_replica_context()
    if not tf.executing_eagerly():
        return levels[context._replica_id].within.sum(tensors)

    @tf.function(autograph=False)
    def sum_all(by_replica: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        pairs = zip(levels, by_replica)
        return [one.within.sum(own) for one, own in pairs]

    def merged(strategy: tf.distribute.Strategy, tensors: Sequence[Any]) -> list[Any]:
        local = [strategy.experimental_local_results(tensor) for tensor in tensors]
        summed = sum_all([[of_all[i] for of_all in local] for i in range(len(levels))])
        return [distribute_utils.regroup(tuple(replicas)) for replicas in zip(*summed)]

    # Eager replicas run one after the other: only a merge_call lets all of them take part.
    return context.merge_call(merged, (tensors,))


def ranks_by_place(topology: Topology) -> list[int]:
    """Ranks of the workers in the order of a `Route`'s rows.

    Example:

    >>> ranks_by_place(Topology(((0, 1), (2, 3))))
    [0, 2, 1, 3]
    """
    # As `levels_of` sorts those that have the same place in their groups.
    return [rank for peers in zip(*topology.groups) for rank in sorted(peers)]
