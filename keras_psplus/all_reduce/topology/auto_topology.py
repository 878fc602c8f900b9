"""`topology="auto"`: links that are measured, groups and rings that they make."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from keras_psplus import planning, text_table
from keras_psplus.all_reduce.collectives import operations
from keras_psplus.all_reduce.topology.group_topology import FLAT, Topology
from keras_psplus.log import logger
from keras_psplus.planning import Links
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
    from keras_psplus.core.jobs.control import ControlPlane


# Order of hosts in a ring with short distances between neighbours.

# Of the time of one ring as it is, what another order, or two levels, may take at most: what is
# measured is not exact.
_WINS = 0.85
# Nobody waits long for the last bit: each pass looks at all pairs of neighbours.
_MOST_PASSES, _LEAST_MS = 20, 1e-9


@dataclasses.dataclass(frozen=True)
class Order:
    """An order of hosts that is better than theirs."""

    hosts: tuple[str, ...]
    before_ms: float
    after_ms: float


def better_ring(
    links: Links, ring: Sequence[int], groups: Sequence[Sequence[int]], count: float
) -> Order | None:
    """Finds an order of hosts with which a ring takes clearly less time.

    Args:
        ring: Ranks in the order in which the ring goes round them; the same whatever host has
            which rank. The first host keeps its rank.
        groups: Of hosts that are near each other, as places in `links.hosts`. What leaves a group
            is taken to share one link.
        count: Bytes that are summed.

    Returns:
        `Order`, or None if there is none that takes at most 85 % of the time.
    """
    own = list(ring)
    before = ring_ms(links, own, groups, count)
    found = min(
        (_shortened(links, _from_nearest(links, own[0]), count), own),
        key=lambda order: ring_ms(links, order, groups, count),
    )
    after = ring_ms(links, found, groups, count)
    if after > _WINS * before:
        return None
    at_rank = dict(zip(ring, found, strict=True))
    hosts = tuple(links.hosts[at_rank[rank]] for rank in range(len(links.hosts)))
    return Order(hosts, before, after)


def ring_ms(
    links: Links, order: Sequence[int], groups: Sequence[Sequence[int]], count: float
) -> float:
    """Milliseconds of a sum along a ring, whose rounds take the slowest link's time.

    There are two rounds for each piece but the first.
    """
    group_of = {host: number for number, group in enumerate(groups) for host in group}
    slowest, leaving = 0.0, [0.0] * len(groups)
    for host, following in zip(order, [*order[1:], order[0]]):
        ms = _ms(links, host, following, count / len(order))
        slowest = max(slowest, ms)
        if group_of[host] != group_of[following]:
            leaving[group_of[host]] += ms
    return 2 * (len(order) - 1) * max(slowest, *leaving)


def _ms(links: Links, host: int, other: int, count: float) -> float:
    link = links.links[min(host, other), max(host, other)]
    return link.latency_ms + 8e3 * count / link.bits_per_second


def _from_nearest(links: Links, first: int) -> list[int]:
    order, left = [first], [host for host in range(len(links.hosts)) if host != first]
    while left:
        # A message of some length: neither latency nor bandwidth alone.
        nearest = min(left, key=lambda host: _ms(links, order[-1], host, 1 << 16))
        left.remove(nearest)
        order.append(nearest)
    return order


def _shortened(links: Links, order: list[int], count: float) -> list[int]:
    """The order with stretches turned round while that makes the way round shorter."""
    hosts = range(len(order))
    ms = [[0.0 if i == j else _ms(links, i, j, count / len(order)) for j in hosts] for i in hosts]
    for _ in range(_MOST_PASSES):
        before = list(order)
        for i, j in itertools.combinations(range(1, len(order) + 1), 2):
            outside, first, last, following = (
                order[i - 1],
                order[i],
                order[j - 1],
                order[j % len(order)],
            )
            saved = ms[outside][first] + ms[last][following]
            saved -= ms[outside][last] + ms[first][following]
            if saved > _LEAST_MS:
                order = [*order[:i], *reversed(order[i:j]), *order[j:]]
        if order == before:
            break
    return order


# Latency and bandwidth between workers, measured by TensorFlow's collectives.

# Bytes that both of a pair send each other: the times of a message, and of its bytes.
_SHORT, _LONG = 1, 1 << 16
_LINK_ROUNDS, _BATCH = 3, 2


class MeasuredLink(NamedTuple):
    """One pair of workers.

    Attributes:
        latency: Seconds that a short message takes.
        transfer: Seconds that a long one takes, both ways at once.
    """

    latency: float
    transfer: float

    @property
    def bandwidth(self) -> float:
        """Bits per second, each way, beside other pairs that are measured at the same time."""
        return 32.0 * _LONG / max(self.transfer - self.latency, 1e-9)


MeasuredLinks = dict[tuple[int, int], MeasuredLink]


def rounds_of_pairs(number: int) -> list[list[tuple[int, int]]]:
    """Each pair of so many once, in rounds in which nobody is in two pairs."""
    # The worker that is paired with a number which is not there waits.
    places = list(range(number + number % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]))
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < number])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure(extended: MultiWorkerMirroredExtended) -> MeasuredLinks:
    """Measures each pair of workers; to be called on all of them.

    Args:
        extended: The strategy's. The first replica of each worker sends and receives.
    """
    workers, mine = extended._num_workers, extended._id_in_cluster
    local = len(extended.worker_devices)
    first_key = extended.take_group_keys(workers * workers)
    own = {}
    for pairs in rounds_of_pairs(workers):
        for pair in pairs:
            if mine in pair:
                launcher = extended.launcher(0).like(
                    first_key + pair[0] * workers + pair[1],
                    [worker * local for worker in pair],
                )
                own[pair] = [_exchange_seconds(launcher, size) for size in (_SHORT, _LONG)]
    assert extended.control is not None
    text = json.dumps([[*pair, *seconds] for pair, seconds in own.items()])
    slowest: MeasuredLinks = {}
    for one in extended.control.exchange("links", text):
        for first, second, *seconds in json.loads(one):
            # Of what both have measured, the longer.
            before = slowest.get((first, second), MeasuredLink(0.0, 0.0))
            slowest[first, second] = MeasuredLink(*map(max, zip(before, seconds)))
    return dict(sorted(slowest.items()))


def _exchange_seconds(launcher: Launcher, size: int) -> float:
    """Least seconds of one exchange, after a first call that connects the workers."""

    @tf.function(autograph=False)
    def exchange() -> tf.Tensor:
        with ops.device(launcher._device):
            found = tf.zeros([2, size])
            for _ in range(_BATCH):
                found = launcher.all_to_all(found)
            return tf.reduce_sum(found)

    exchange().numpy()
    found = []
    for _ in range(_LINK_ROUNDS):
        begin = time.perf_counter()
        exchange().numpy()
        found.append(time.perf_counter() - begin)
    return min(found) / _BATCH


def as_file(links: MeasuredLinks, names: Sequence[str]) -> planning.Links:
    """The links in the form of the file that `keras-psplus doctor --links --json` writes."""
    return planning.Links(
        names,
        {pair: planning.Link(1e3 * link.latency, link.bandwidth) for pair, link in links.items()},
    )


def links_table(links: MeasuredLinks, names: Sequence[str]) -> str:
    """The links as a table: milliseconds of a short message, megabits per second."""
    rows = [("", *names[1:])]
    for i, name in enumerate(names[:-1]):
        cells = [""] * i
        for j in range(i + 1, len(names)):
            link = links[i, j]
            cells.append(f"{1e3 * link.latency:.1f} ms {1e-6 * link.bandwidth:,.0f} Mbit/s")
        rows.append((name, *cells))
    return text_table.aligned(rows)


# `topology="auto"`: groups that the links make, if two levels win over one ring.

# Least ratio of the times of a message between groups and inside of one.
_APART = 1.8
_ELEMENTS, _ROUNDS = 1 << 18, 3


class ChosenTopology(NamedTuple):
    """A chosen topology, and the measurements behind it."""

    topology: Topology | str
    report: str
    links: MeasuredLinks


def decide(extended: MultiWorkerMirroredExtended) -> ChosenTopology:
    """Measures links, finds groups, and tries one ring and two levels; on all workers."""
    control, local = extended.control, len(extended.worker_devices)
    if control is None:
        return ChosenTopology(FLAT, "one worker: one ring", {})
    names = control.names
    begin = time.monotonic()
    links = measure(extended)
    groups = groups_of(links, len(names))
    table = links_table(links, names) + _better_order(links, groups, control)
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


def groups_of(links: MeasuredLinks, workers: int) -> Topology:
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


def _better_order(links: MeasuredLinks, groups: Topology, control: ControlPlane) -> str:
    """Describes a faster order of the workers in a ring; an empty text if none.

    The order cannot be changed here: rings have the order of tasks' names.
    """
    found = better_ring(
        as_file(links, control.names),
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
