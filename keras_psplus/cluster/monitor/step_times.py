"""Seconds of training steps by task and cause, and the slowest task."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import statistics
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from keras_psplus.cluster import handshake

DATA, COMPUTE, LINK, SERVER, HOST = "data", "compute", "link", "server", "callbacks"
_CAUSES = (DATA, COMPUTE, LINK, SERVER, HOST)
# The slowest task is named when its steps take so many times as long as the median worker's.
FACTOR = 1.3
_LEAST_SECONDS = 2e-3  # less is the operating system's
# A connection with fewer bytes says little of the link below it.
_SIGNIFICANT = 0.25
_UNEQUAL_STAGES = (
    '. All stages wait for it: give it fewer layers; stages="auto" cuts the model by measured times'
)


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of a task's training steps, added up since its start.

    Attributes:
        steps: Number of steps.
        seconds: All of their time.
        data: Waiting for batches.
        reads: Reading batches beside the steps, which wait for what it takes longer than they do.
        link: Sending and receiving; with parameter servers, their work included.
        server: Work of servers, where it is known apart from the link.
        host: Callbacks and Python between two steps.
        meets: In collectives: the link, and waiting for others that come later.
        wait: Waiting for others.
        servers: Seconds by server.
        peers: Bytes sent and seconds of sending by peer, as the operating system counts them.
        part: Part of the model that the task has, such as `"stage 1"`; empty for all of it.
    """

    steps: float = 0.0
    seconds: float = 0.0
    data: float = 0.0
    reads: float = 0.0
    link: float = 0.0
    server: float = 0.0
    host: float = 0.0
    meets: float = 0.0
    wait: float = 0.0
    servers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peers: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    part: str = ""

    def plus(self, other: StepTimes, sign: float = 1.0) -> StepTimes:
        changed: dict[str, Any] = {
            name: getattr(self, name) + sign * getattr(other, name) for name in _NUMBERS
        }
        names, none = {**self.servers, **other.servers}, (0.0, 0.0)
        changed["servers"] = {
            n: self.servers.get(n, 0.0) + sign * other.servers.get(n, 0.0) for n in names
        }
        pairs = {
            n: (self.peers.get(n, none), other.peers.get(n, none))
            for n in {**self.peers, **other.peers}
        }
        changed["peers"] = {
            n: (a[0] + sign * b[0], a[1] + sign * b[1]) for n, (a, b) in pairs.items()
        }
        return StepTimes(**changed, part=self.part or other.part)

    def since(self, before: StepTimes) -> StepTimes:
        return self.plus(before, -1.0)

    def per_step(self) -> StepTimes:
        share = 1.0 / max(self.steps, 1.0)
        return dataclasses.replace(StepTimes().plus(self, share), steps=self.steps)

    def cause(self, name: str) -> float:
        """Seconds by a cause, one of `"data"`, `"compute"`, `"link"`, `"server"`, `"callbacks"`."""
        if name == DATA:
            return self.data + max(0.0, self.reads - self.seconds)
        if name == COMPUTE:
            rest = self.data + self.link + self.server + self.meets + self.wait
            return max(0.0, self.seconds - rest)
        return float(self.host if name == HOST else getattr(self, name))

    @property
    def of_its_own(self) -> float:
        """Seconds that do not depend on when other workers arrive."""
        return sum(self.cause(name) for name in _CAUSES)

    def to_json(self) -> dict[str, Any]:
        """Milliseconds by cause of means of one step, for the JSON log."""
        found = {f"{name}_ms": _ms(self.cause(name)) for name in _CAUSES}
        found["wait_ms"] = _ms(self.wait)
        if self.meets:
            found["collective_ms"] = _ms(self.meets)
        part = {"part": self.part} if self.part else {}
        return {"steps": round(self.steps), **part, **found}

    def packed(self) -> dict[str, Any]:
        """Fields that are not zero, of JSON's types, for `unpacked`."""
        most = max((sent for sent, _ in self.peers.values()), default=0.0)
        # Of a thousand workers, a ring's neighbours.
        peers = {n: pair for n, pair in self.peers.items() if pair[0] >= _SIGNIFICANT * most > 0}
        fields = {**dataclasses.asdict(self), "peers": peers}
        return {name: value for name, value in fields.items() if value}


_NUMBERS = tuple(
    f.name for f in dataclasses.fields(StepTimes) if f.name not in ("servers", "peers", "part")
)


def unpacked(packed: Mapping[str, Any]) -> StepTimes:
    """The `StepTimes` that `packed` was made of."""
    peers = {name: (b, s) for name, (b, s) in packed.get("peers", {}).items()}
    return StepTimes(**{**packed, "peers": peers})


class Slowest(NamedTuple):
    """The task that holds the others up.

    Attributes:
        task: Its name.
        cause: What its time goes to.
        factor: Its steps' time over the median worker's; a server's or chief's, steps with it over
            steps without it.
        seconds: Seconds of a step that go to the cause.
        usual: The same of the median task of its kind.
        part: Part of the model that the task has; empty for all of it.
    """

    task: str
    cause: str
    factor: float
    seconds: float
    usual: float
    part: str = ""

    def __str__(self) -> str:
        own, usual = (f"{seconds * 1e3:.1f} ms" for seconds in (self.seconds, self.usual))
        part = f" ({self.part})" if self.part else ""
        advice = _UNEQUAL_STAGES if self.part and self.cause == COMPUTE else ""
        return (
            f"{self.task}{part}, {self.factor:.1f} times the median worker's step, by {self.cause} "
            f"({own} a step, median {usual}){advice}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **{"task": self.task, "cause": self.cause, "factor": round(self.factor, 2)},
            **({"part": self.part} if self.part else {}),
            **{f"{self.cause}_ms": _ms(self.seconds), "median_ms": _ms(self.usual)},
        }


def apart(times: Mapping[str, StepTimes]) -> dict[str, StepTimes]:
    """Means of one step, with time in collectives divided into link and waiting for others.

    The last to arrive waits for nobody: its time is the link's.
    """
    means = {name: each.per_step() for name, each in times.items() if each.steps}
    least = min((each.meets for each in means.values()), default=0.0)
    return {
        name: dataclasses.replace(
            each, meets=0.0, link=each.link + least, wait=each.wait + each.meets - least
        )
        for name, each in means.items()
    }


def slowest(times: Mapping[str, StepTimes]) -> Slowest | None:
    """The task that holds the others up; None if all are about alike."""
    means = _with_links(apart(times))
    workers = {name: each for name, each in means.items() if each.seconds}
    if not workers:
        return None
    usual = statistics.median_low(each.of_its_own for each in workers.values())
    found = [_slowest_server(workers, usual), _slow_chief(means, workers)]
    if len(workers) > 1:
        found.append(_slowest_worker(workers, usual))
    return max((one for one in found if one is not None), key=lambda one: one.factor, default=None)


def by_server(times: Mapping[str, StepTimes]) -> dict[str, float]:
    """Milliseconds that a worker's step waits for each server, the median of all workers."""
    workers = {name: each for name, each in times.items() if each.seconds}
    return {name: _ms(seconds) for name, seconds in _seconds_by_server(workers).items()}


def _slowest_worker(workers: Mapping[str, StepTimes], usual: float) -> Slowest | None:
    name = max(workers, key=lambda name: workers[name].of_its_own)
    excess = workers[name].of_its_own - usual
    if excess < _LEAST_SECONDS or excess < (FACTOR - 1) * usual:
        return None
    medians = {
        cause: statistics.median_low(each.cause(cause) for each in workers.values())
        for cause in _CAUSES
    }
    cause = max(_CAUSES, key=lambda cause: workers[name].cause(cause) - medians[cause])
    factor = 1 + excess / max(usual, _LEAST_SECONDS)
    slow = workers[name]
    return Slowest(name, cause, factor, slow.cause(cause), medians[cause], slow.part)


def _slowest_server(workers: Mapping[str, StepTimes], usual: float) -> Slowest | None:
    """Finds the server without whose excess steps would be so much faster."""
    seconds = _seconds_by_server(workers)
    if len(seconds) < 2:
        return None
    name, median = max(seconds, key=seconds.__getitem__), statistics.median_low(seconds.values())
    return _without(name, SERVER, seconds[name], median, usual)


def _seconds_by_server(workers: Mapping[str, StepTimes]) -> dict[str, float]:
    names = sorted({server for each in workers.values() for server in each.servers})
    return {
        name: statistics.median_low(each.servers.get(name, 0.0) for each in workers.values())
        for name in names
    }


def _slow_chief(means: Mapping[str, StepTimes], workers: Mapping[str, StepTimes]) -> Slowest | None:
    """The chief, where workers wait for the data that it reads, or for its callbacks."""
    busy = sum(each.steps * each.of_its_own for each in workers.values()) / len(workers)
    for name, each in means.items():
        if not each.seconds:
            cause = DATA if each.data >= each.host else HOST
            whole = each.data + each.host + each.wait
            # Workers compute meanwhile.
            excess = min(each.cause(cause), whole - busy / each.steps)
            return _without(name, cause, excess, 0.0, whole)
    return None


def _without(name: str, cause: str, own: float, median: float, usual: float) -> Slowest | None:
    excess = own - median
    rest = max(usual - excess, _LEAST_SECONDS)
    if excess < _LEAST_SECONDS or excess < (FACTOR - 1) * rest or own < FACTOR * median:
        return None
    return Slowest(name, cause, 1 + excess / rest, own, median)


def _with_links(means: dict[str, StepTimes]) -> dict[str, StepTimes]:
    """Attributes the link's time of collectives to the workers with slow links.

    In the result, `link` is that of a worker's own link, and the rest is waiting for others.

    A collective is over for all at the same time, so that one slow link looks like that of each.
    The link of a worker is as good as its best connection: a bad one may be the peer's fault.
    """
    neighbours: dict[str, set[str]] = {name: set() for name in means}
    for name, each in means.items():
        for peer in each.peers:
            if peer in means:
                neighbours[name].add(peer)
                neighbours[peer].add(name)
    best = {
        name: _best(_of_pair(means, name, peer) for peer in peers)
        for name, peers in neighbours.items()
    }
    if len(best) < 3 or not all(best.values()):
        return means
    longest = max(best.values())
    own = {name: each.link * best[name] / longest for name, each in means.items()}
    return {
        name: dataclasses.replace(each, link=own[name], wait=each.wait + each.link - own[name])
        for name, each in means.items()
    }


def _of_pair(means: Mapping[str, StepTimes], one: str, other: str) -> tuple[float, float]:
    ways = means[one].peers.get(other, (0.0, 0.0)), means[other].peers.get(one, (0.0, 0.0))
    return ways[0][0] + ways[1][0], ways[0][1] + ways[1][1]


def _best(pairs: Iterable[tuple[float, float]]) -> float:
    pairs = list(pairs)
    most = max((sent for sent, _ in pairs), default=0.0)
    return min((s for sent, s in pairs if sent >= _SIGNIFICANT * most), default=0.0)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


# This process's TCP connections, also TensorFlow's: what the kernel counts, and their end.


# Of Linux's `struct tcp_info`, which only grows at its end.
_ACKED, _BUSY_US, _SIZE = 120, 168, 192
# Local and remote address, and what was acknowledged: bytes, and seconds with data under way.
_Key = tuple[tuple[str, int], tuple[str, int]]


class PeerConnections:
    """Totals of sending by peer, of connections that come and go."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._names: dict[str, str | None] = {}
        for name, address in addresses.items():
            host = address.rpartition(":")[0].strip("[]")
            with contextlib.suppress(OSError):
                for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                    ip = str(found[4][0])
                    # Peers of one host cannot be told apart.
                    self._names[ip] = None if ip in self._names else name
        self._last: dict[_Key, tuple[float, float]] = {}
        self._totals: dict[str, tuple[float, float]] = {}

    def totals(self) -> dict[str, tuple[float, float]]:
        """Bytes sent and seconds of sending by peer, if it has its own host."""
        if not any(self._names.values()):
            return {}
        now = _connections()
        for key, (sent, busy) in now.items():
            name = self._names.get(key[1][0])
            if name is None:
                continue
            before, total = self._last.get(key, (0.0, 0.0)), self._totals.get(name, (0.0, 0.0))
            changed = max(0.0, sent - before[0]), max(0.0, busy - before[1])
            self._totals[name] = total[0] + changed[0], total[1] + changed[1]
        self._last = now
        return dict(self._totals)


def cut(address: str) -> None:
    """Breaks this process's connections to a `host:port`, so that calls there fail."""
    places = {_plain(place[:2]) for _, place in handshake.places_of(address)}
    for one, (_, peer) in _sockets():
        if peer in places:
            with contextlib.suppress(OSError):  # It has ended by itself.
                one.shutdown(socket.SHUT_RDWR)


def _connections() -> dict[_Key, tuple[float, float]]:
    found = {}
    for one, key in _sockets():
        with contextlib.suppress(OSError, struct.error):
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            (acked,) = struct.unpack_from("Q", info, _ACKED)
            (busy,) = struct.unpack_from("Q", info, _BUSY_US)
            found[key] = float(acked), busy * 1e-6
    return found


def _sockets() -> Iterator[tuple[socket.socket, _Key]]:
    """Copies of this process's connected sockets, with their local and remote addresses."""
    with contextlib.suppress(OSError):  # not Linux
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    continue
                with _copy_of(int(number)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        yield one, (one.getsockname()[:2], _plain(one.getpeername()[:2]))


def _copy_of(number: int) -> socket.socket:
    copied = os.dup(number)
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise


def _plain(address: tuple[str, int]) -> tuple[str, int]:
    """An address without the prefix of IPv4 over IPv6, as gRPC's sockets have it."""
    return address[0].removeprefix("::ffff:"), address[1]
