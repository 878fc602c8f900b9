"""`topology="auto"`: groups that the links make, if two levels win over one ring."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.collectives import operations
from keras_psplus.all_reduce.topology import links as links_module
from keras_psplus.all_reduce.topology import ring_order
from keras_psplus.all_reduce.topology.group_topology import FLAT, Topology
from keras_psplus.all_reduce.topology.links import Links
from keras_psplus.log import logger
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
    from keras_psplus.core.jobs.control import ControlPlane

# How many times as long a message takes between groups as inside of one, at least.
_APART = 1.8
# Of the time of one ring, what two levels may take at most: what is measured is not exact.
_WINS = 0.85
_ELEMENTS, _ROUNDS = 1 << 18, 3


class ChosenTopology(NamedTuple):
    """A chosen topology, and the measurements behind it.

    Attributes:
        report: A table of the links, and a line on the choice.
    """

    topology: Topology | str
    report: str
    links: Links


def decide(extended: MultiWorkerMirroredExtended) -> ChosenTopology:
    """Measures links, finds groups, and tries one ring and two levels; on all workers.

    Args:
        extended: The strategy's, whose topology is flat.
    """
    control, local = extended.control, len(extended.worker_devices)
    if control is None:
        return ChosenTopology(FLAT, "one worker: one ring", {})
    names = control.names
    begin = time.monotonic()
    links = links_module.measure(extended)
    groups = groups_of(links, len(names))
    table = links_module.table(links, names) + _better_order(links, groups, control)
    if not (groups.is_even and groups.of_replicas(local).has_levels):
        reason = "no links are faster than others"
        if not groups.is_even:
            reason = f"groups {groups.describe(names)} are not of one size"
        took = time.monotonic() - begin
        report = f"{table}\none ring: {reason} ({took:.1f} s)"
        return ChosenTopology(FLAT, report, links)
    milliseconds = _tried(extended, control, groups)
    wins = milliseconds[1] < _WINS * milliseconds[0]
    took = time.monotonic() - begin
    choice = f"groups {groups.describe(names)}" if wins else "one ring"
    report = (
        f"{table}\n{choice}: {_ELEMENTS * 4 / 2**20:.0f} MiB take {milliseconds[0]:.0f} ms along "
        f"one ring, {milliseconds[1]:.0f} ms in groups {groups.describe(names)} ({took:.1f} s)"
    )
    return ChosenTopology(groups if wins else FLAT, report, links)


def groups_of(links: Links, workers: int) -> Topology:
    """Groups of workers with faster links among them than to others.

    Returns:
        `Topology`; with one group, or groups of one worker, if links are alike or make no groups.
    """
    everyone = Topology((tuple(range(workers)),))
    alone = Topology(tuple((worker,) for worker in range(workers)))
    seconds = sorted(link.transfer for link in links.values())
    gaps = [(after / before, before) for before, after in zip(seconds, seconds[1:])]
    ratio, limit = max(gaps, default=(1.0, 0.0))
    if ratio < _APART:
        return alone
    groups: list[set[int]] = []
    for worker in range(workers):
        near = [
            group
            for group in groups
            if all(links[min(worker, o), max(worker, o)].transfer <= limit for o in group)
        ]
        near[0].add(worker) if near else groups.append({worker})
    of = {worker: i for i, group in enumerate(groups) for worker in group}
    if any(of[a] != of[b] and link.transfer <= limit for (a, b), link in links.items()):
        # Some are near to members of two groups.
        return alone
    found = Topology(tuple(sorted(tuple(sorted(group)) for group in groups)))
    return everyone if len(groups) == 1 else found


def _better_order(links: Links, groups: Topology, control: ControlPlane) -> str:
    """Describes a faster order of the workers in a ring; an empty text if none.

    The order cannot be changed here: rings have the order of tasks' names.
    """
    found = ring_order.better(
        links_module.as_file(links, control.names),
        operations.ranks_by_place(operations.names_of(control.task, 1)),
        groups.groups,
        4 * _ELEMENTS,
    )
    if found is None:
        return ""
    return (
        f"\none ring would take {found.after_ms / found.before_ms:.2f} of its time with the "
        f"workers in this order in TF_CONFIG or --hosts: {' '.join(found.hosts)} "
        f"({found.after_ms:.0f} ms instead of {found.before_ms:.0f} for {_ELEMENTS * 4 / 2**20:.0f}"
        " MiB, computed from this table)"
    )


def _tried(
    extended: MultiWorkerMirroredExtended, control: ControlPlane, groups: Topology
) -> list[float]:
    """Milliseconds of a sum along one ring, and in groups, as gradients would take."""
    own = []
    for topology in (FLAT, groups):
        extended.set_topology(topology)
        own.append(_seconds(extended))
    extended.set_topology(FLAT)
    everyone = [json.loads(one) for one in control.exchange("sums", json.dumps(own))]
    return [1e3 * max(of_one) for of_one in zip(*everyone)]


class _Variable(NamedTuple):
    path: str
    shape: tf.TensorShape


class _Owner:
    """Owner of the trial's residuals, which are deleted with it."""


def _seconds(extended: MultiWorkerMirroredExtended) -> float:
    shape = tf.TensorShape([_ELEMENTS // 512, 512])
    variable, owner = _Variable("links", shape), _Owner()
    step = tf.constant(0, tf.int64)

    @tf.function(autograph=False)
    def sum_all() -> list[tf.Tensor]:
        totals = []
        for replica, launcher in enumerate(extended._cross_device_ops.launchers):
            with ops.device(launcher._device):
                gradient = tf.random.stateless_normal(shape, [1, replica])
            totals += extended.reducers.sum_on(replica, [gradient], [variable], step, owner)
        return [tf.reduce_sum(total) for total in totals]

    def run() -> float:
        begin = time.perf_counter()
        for total in sum_all():
            total.numpy()
        return time.perf_counter() - begin

    run()
    found = [run() for _ in range(_ROUNDS)]
    return statistics.median(found)


def choose(extended: MultiWorkerMirroredExtended) -> Topology | str:
    """Has gradients be summed along the best path that `decide` finds; the chief says which."""
    decision = decide(extended)
    extended.set_topology(decision.topology)
    if extended._is_chief and extended.control is not None:
        logger.info("topology\n%s", decision.report)
    return decision.topology
