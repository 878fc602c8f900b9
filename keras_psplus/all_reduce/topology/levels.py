"""The collectives of a topology's two hops, as one replica sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.collectives.operations import Launcher
from keras_psplus.all_reduce.topology.group_topology import Topology
from keras_psplus.tf_internals import distribute_utils


class Hop(NamedTuple):
    """The replicas that exchange something on one hop.

    Attributes:
        ranks: Their ranks among all replicas, in order, which is that of what is gathered.
        place: This replica's place among them.
    """

    launcher: Launcher
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)


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
    within = Hop(launcher_like(launcher, first_key + number, group), group, place)
    peers = tuple(sorted(group[place] for group in topology.groups))
    own = launcher_like(launcher, first_key + len(topology.groups) + place, peers)
    between = Hop(own, peers, peers.index(rank))
    after = (rank + 1) % sum(map(len, topology.groups))
    return Levels(within, between, topology.group_of(after) != number)


def keys_of(topology: Topology) -> int:
    """Number of group keys that `levels_of` needs."""
    return len(topology.groups) + len(topology.groups[0])


def launcher_like(launcher: Launcher, group_key: int, ranks: Sequence[int]) -> Launcher:
    """The collectives of some replicas, one of them that of another `Launcher`."""
    members = launcher.members and [launcher.members[rank] for rank in ranks]
    options = launcher._collective_keys, launcher._device, launcher._options
    made = Launcher(group_key, len(ranks), *options, members)
    made.serialize_with(launcher)
    return made


def sum_over_group(levels: Sequence[Levels], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums small tensors over the replicas of this one's group, in replica context."""
    context = tf.distribute.get_replica_context()
    if not tf.executing_eagerly():
        return gradients.sum_packed(levels[context._replica_id].within.launcher, tensors)

    @tf.function(autograph=False)
    def sum_all(by_replica: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        pairs = zip(levels, by_replica)
        return [gradients.sum_packed(one.within.launcher, own) for one, own in pairs]

    def merged(strategy: tf.distribute.Strategy, tensors: Sequence[Any]) -> list[Any]:
        local = [strategy.experimental_local_results(tensor) for tensor in tensors]
        summed = sum_all([[of_all[i] for of_all in local] for i in range(len(levels))])
        return [distribute_utils.regroup(tuple(replicas)) for replicas in zip(*summed)]

    # Eager replicas run one after the other: only a merge_call lets all of them take part.
    return context.merge_call(merged, (tensors,))
