"""Ranks and number of processes, read from a launcher's environment variables."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from keras_psplus.cluster.config import ClusterConfigError, split_address
from keras_psplus.cluster.discovery import rendezvous
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE

# For launchers that say nothing of hosts.
HOSTS_VARIABLE = "KERAS_PSPLUS_HOSTS"
PORT_VARIABLE = "KERAS_PSPLUS_PORT"
# Of a job that others may join: the rank of the first process that is started together with this.
FIRST_RANK_VARIABLE = "KERAS_PSPLUS_FIRST_RANK"
# Below the ports that connections get, also those of control channels: 1,216 blocks of 16.
_FIRST_PORT, _BLOCK, _BLOCKS = 12_288, 16, 1_216


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes of a job.

    Args:
        source: What says so, for people: `"Slurm (job 12, step 0)"`.
        size: Number of processes.
        hosts: Host of each rank, or None if the launcher does not say.
        port: Port of the first process on each host; the next have the following ones.
        local_size: Number of processes on this host, or None if the launcher does not say.
        first_host: Host of the first process, if the launcher says that alone.
    """

    source: str
    rank: int
    size: int
    hosts: tuple[str, ...] | None
    port: int
    local_size: int | None = None
    first_host: str | None = None

    def addresses(self, environ: Mapping[str, str], timeout: float = 300.0) -> list[str]:
        """Returns the `host:port` of each rank.

        Args:
            environ: The environment: `KERAS_PSPLUS_HOSTS` and `KERAS_PSPLUS_PORT` count more than
                what the launcher says.
            timeout: Seconds to wait for the others, where processes tell each other their hosts.

        Raises:
            ClusterConfigError: If hosts are not known, or the variables are wrong.
        """
        text = environ.get(PORT_VARIABLE, "")
        port = number(PORT_VARIABLE, text, 1, 65_535) if text else self.port
        hosts = self._hosts(environ, port, timeout)
        seen: dict[str, int] = {}
        addresses = []
        for host in hosts:
            seen[host] = seen.get(host, -1) + 1
            addresses.append(f"{_bracketed(host)}:{port + seen[host]}")
        if port + max(seen.values()) > 65_535:
            raise ClusterConfigError(
                f"The ports of {max(seen.values()) + 1} processes on a host begin at {port} and "
                f"would end above 65535. Set {PORT_VARIABLE} to a lower one. Received: {port}"
            )
        return addresses

    def within(self, size: int, environ: Mapping[str, str]) -> Ranks:
        """Returns these processes' ranks in a job that others may join.

        Args:
            size: Number of ranks of the job, with all workers of the range.
            environ: The environment, with `KERAS_PSPLUS_FIRST_RANK` in processes that join.

        Raises:
            ClusterConfigError: If there are not so many ranks.
        """
        if not environ.get(MIN_WORKERS_VARIABLE) or size <= self.size:
            return self
        text = environ.get(FIRST_RANK_VARIABLE) or "0"
        first = number(FIRST_RANK_VARIABLE, text, 0, size - self.size)
        # The others' hosts are not those of this start alone.
        unknown: dict[str, Any] = {"hosts": None, "local_size": None, "first_host": None}
        return dataclasses.replace(self, rank=first + self.rank, size=size, **unknown)

    def _hosts(self, environ: Mapping[str, str], port: int, timeout: float) -> Sequence[str]:
        text = environ.get(HOSTS_VARIABLE, "")
        if text:
            hosts = [_host(host.strip(), text) for host in text.split(",")]
            if not all(hosts) or self.size % len(hosts):
                raise ClusterConfigError(
                    f"{HOSTS_VARIABLE} must name one host for each of the {self.size} processes, "
                    f"or one for each as many of them. Received: {HOSTS_VARIABLE}={text}"
                )
            each = self.size // len(hosts)
            return [host for host in hosts for _ in range(each)]
        if self.hosts is not None:
            return self.hosts
        if self.local_size == self.size:
            return ["127.0.0.1"] * self.size
        if self.first_host is not None:
            address = f"{_bracketed(self.first_host)}:{port}"
            return rendezvous.exchange_hosts(self.rank, self.size, address, timeout)
        raise ClusterConfigError(
            f"{self.source} says that this is process {self.rank} of {self.size}, but not on which "
            f"hosts the others are. Set {HOSTS_VARIABLE} to the hosts, in the order of the ranks, "
            "such as host1,host2 in every process; or set TF_CONFIG. "
            f"Received: {self.source} without {HOSTS_VARIABLE}"
        )


def _host(host: str, text: str) -> str:
    """One of the hosts that a user names, without brackets."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if ":" in bare:
            ipaddress.IPv6Address(bare)
        elif host:
            split_address(f"{host}:1")
    except ValueError:
        raise ClusterConfigError(
            f"{HOSTS_VARIABLE} must name hosts without ports, such as host1,host2: each process "
            f"has a port of its own, from {PORT_VARIABLE} up. {host!r} is no host. "
            f"Received: {HOSTS_VARIABLE}={text}"
        ) from None
    return bare


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def number(name: str, text: str, least: int, most: int | None = None) -> int:
    """Returns the value of an environment variable as an int.

    Raises:
        ClusterConfigError: If it is no whole number, or out of bounds.
    """
    good = text.strip().isascii() and text.strip().isdigit() and int(text) >= least
    if not good or (most is not None and int(text) > most):
        allowed = f"from {least} up" if most is None else f"from {least} to {most}"
        raise ClusterConfigError(
            f"{name} must be a whole number {allowed}. Received: {name}={text!r}"
        )
    return int(text)


def read_pair(
    environ: Mapping[str, str], rank: str, size: str, launcher: str
) -> tuple[int, int] | None:
    """Reads a rank and the number of ranks; None if neither is set.

    Raises:
        ClusterConfigError: If one is missing, or they do not go together.
    """
    given = {name: environ.get(name, "").strip() for name in (rank, size)}
    if not any(given.values()):
        return None
    for name, other in ((rank, size), (size, rank)):
        if not given[name]:
            raise ClusterConfigError(
                f"{other} is set, but {name} is not: {launcher} sets both. Start every process by "
                f"it, unset {other}, or set TF_CONFIG. Received: {other}={given[other]}"
            )
    count = number(size, given[size], 1)
    return number(rank, given[rank], 0, count - 1), count


def port_of_job(*numbers: int) -> int:
    """Port for a job's first process on a host, which differs between jobs.

    Args:
        *numbers: Whole numbers that name the job and its part. Two jobs whose last numbers differ
            by less than 1,216 have different blocks of 16 ports.
    """
    number = 0
    for one in numbers:
        number = 521 * number + one
    return _FIRST_PORT + _BLOCK * (number % _BLOCKS)


def per_host(counts: Sequence[int], hosts: Sequence[str], cyclic: bool) -> tuple[str, ...]:
    """Returns the host of each rank.

    Args:
        counts: Number of processes of each host.
        cyclic: Whether ranks go round the hosts, instead of filling one after the other.
    """
    if not cyclic:
        return tuple(host for host, count in zip(hosts, counts) for _ in range(count))
    return tuple(
        host for turn in range(max(counts)) for host, count in zip(hosts, counts) if turn < count
    )
