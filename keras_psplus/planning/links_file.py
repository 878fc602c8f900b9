"""The file of measured links: what `keras-psplus doctor --links --json` writes, `plan` reads."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Link(NamedTuple):
    """One pair of hosts.

    Attributes:
        latency_ms: Milliseconds that a short message takes.
        bits_per_second: Each way.
    """

    latency_ms: float
    bits_per_second: float


class Links(NamedTuple):
    """The links of a cluster.

    Attributes:
        hosts: Names of the hosts, in the order of their ranks.
        links: Dict from pairs of places in `hosts`, the smaller one first, to `Link`.
    """

    hosts: Sequence[str]
    links: Mapping[tuple[int, int], Link]

    @property
    def ring(self) -> list[int]:
        """Places in `hosts` in the order in which TensorFlow's rings go round them.

        It is that of the tasks' names as text, in which task 10 comes before task 2. A first host
        that is named as a chief is one, and the others are workers.
        """
        chiefs = 1 if self.hosts[0].startswith("chief") else 0
        return sorted(range(len(self.hosts)), key=lambda rank: (rank >= chiefs, str(rank - chiefs)))

    @property
    def slowest_of_ring(self) -> Link:
        """The longest latency and the least rate between neighbours of a ring."""
        ring = self.ring
        neighbours = [self.links[min(pair), max(pair)] for pair in zip(ring, ring[1:] + ring[:1])]
        return Link(
            max(link.latency_ms for link in neighbours),
            min(link.bits_per_second for link in neighbours),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "hosts": list(self.hosts),
            "links": [
                {
                    "hosts": [self.hosts[i], self.hosts[j]],
                    "latency_ms": link.latency_ms,
                    "bits_per_second": link.bits_per_second,
                }
                for (i, j), link in self.links.items()
            ],
        }


def read(path: str | os.PathLike[str]) -> Links:
    """Reads and checks a file of links.

    Args:
        path: Path of a file such as

            {"hosts": ["worker-0", "worker-1"],
             "links": [{"hosts": ["worker-0", "worker-1"], "latency_ms": 0.9,
                        "bits_per_second": 9.4e8}]}
    """
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the links cannot be read: {error}. Received: {str(path)!r}") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Links:
    """Reads and checks a text, with errors as of `read`."""
    try:
        given = json.loads(text)
        hosts, rows = given["hosts"], given["links"]
        named = [(row["hosts"], row["latency_ms"], row["bits_per_second"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            "a file of links is what `keras-psplus doctor --links --json` prints: an object with "
            '"hosts", and "links" that each have "hosts", "latency_ms" and "bits_per_second". '
            f"{type(error).__name__}: {error}. Received: {source}"
        ) from None
    problem = _problem(hosts, named)
    if problem:
        raise ValueError(f"the links do not fit: {problem}. Received: {source}")
    place = {host: i for i, host in enumerate(hosts)}
    links = {
        (min(place[a], place[b]), max(place[a], place[b])): Link(float(latency), float(rate))
        for (a, b), latency, rate in named
    }
    return Links(hosts, dict(sorted(links.items())))


def _problem(hosts: Any, named: Sequence[tuple[Any, Any, Any]]) -> str | None:
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        return f'"hosts" is a list of names, and not {hosts!r}'
    if len(hosts) < 2 or len(set(hosts)) < len(hosts):
        return f"it takes two hosts or more, each named once, and not {hosts}"
    seen = set()
    for pair, latency, rate in named:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
            return f"a link is between two hosts, and not {pair!r}"
        unknown = [host for host in pair if host not in hosts]
        if unknown:
            return f'{unknown[0]!r} is not among "hosts"'
        if frozenset(pair) in seen:
            return f"{pair[0]} and {pair[1]} are there twice"
        seen.add(frozenset(pair))
        if not _is_number(latency) or latency < 0:
            return f'"latency_ms" of {pair[0]} and {pair[1]} is 0 or more, and not {latency!r}'
        if not _is_number(rate) or rate <= 0:
            return f'"bits_per_second" of {pair[0]} and {pair[1]} is above 0, and not {rate!r}'
    missing = [p for p in itertools.combinations(hosts, 2) if frozenset(p) not in seen]
    if missing:
        return f"{' and '.join(missing[0])} are missing" + _others(len(missing) - 1)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _others(count: int) -> str:
    return f", and {count} other pair(s)" if count else ""
