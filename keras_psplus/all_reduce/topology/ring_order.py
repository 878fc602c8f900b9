"""Order of hosts in a ring with short distances between neighbours."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from keras_psplus.planning.links_file import Links

# Of the time of the ring as it is, what another order may take at most to be worth a change.
_WINS = 0.85
# Nobody waits long for the last bit: each pass looks at all pairs of neighbours.
_MOST_PASSES, _LEAST_MS = 20, 1e-9


@dataclasses.dataclass(frozen=True)
class Order:
    """An order of hosts that is better than theirs.

    Attributes:
        hosts: Their names, in the order in which they should have their ranks.
        before_ms: Milliseconds of a sum along the ring as it is.
        after_ms: Those along the ring of this order.
    """

    hosts: tuple[str, ...]
    before_ms: float
    after_ms: float


def better(
    links: Links, ring: Sequence[int], groups: Sequence[Sequence[int]], count: float
) -> Order | None:
    """Finds an order of hosts with which a ring takes clearly less time.

    Args:
        links: What was measured between hosts.
        ring: Ranks in the order in which the ring goes round them; the same whatever host has
            which rank. The first host keeps its rank.
        groups: Of hosts that are near each other, as places in `links.hosts`. What leaves a group
            is taken to share one link.
        count: Bytes that are summed.

    Returns:
        `Order`, or None if there is none that takes at most 85 % of the time.

    Example:

    >>> near, far = Link(0.1, 1e9), Link(0.1, 1e8)
    >>> links = {(0, 1): far, (0, 2): near, (0, 3): far, (1, 2): far, (1, 3): near, (2, 3): far}
    >>> found = better(Links(["a", "b", "c", "d"], links), range(4), [[0, 2], [1, 3]], 1e6)
    >>> found.hosts
    ('a', 'c', 'b', 'd')
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

    Args:
        order: Hosts, as places in `links.hosts`, in the order of the ring.
        count: Bytes that are summed.
    """
    group_of = {host: number for number, group in enumerate(groups) for host in group}
    slowest, leaving = 0.0, [0.0] * len(groups)
    for host, following in _edges(order):
        ms = _ms(links, host, following, count / len(order))
        slowest = max(slowest, ms)
        if group_of[host] != group_of[following]:
            leaving[group_of[host]] += ms
    return 2 * (len(order) - 1) * max(slowest, *leaving)


def _edges(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(order, [*order[1:], order[0]])


def _ms(links: Links, host: int, other: int, count: float) -> float:
    link = links.links[min(host, other), max(host, other)]
    return link.latency_ms + 8e3 * count / link.bits_per_second


def _from_nearest(links: Links, first: int) -> list[int]:
    """Nearest-neighbour order, starting from `first`."""
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
