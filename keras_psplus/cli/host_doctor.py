"""`keras-psplus doctor --hosts`: what would keep `keras-psplus run --hosts` from training there."""

from __future__ import annotations

import concurrent.futures
import inspect
import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_psplus.cli.flags import UsageError
from keras_psplus.cluster.config import split_address
from keras_psplus.cluster.environment import Task, plan_tasks
from keras_psplus.cluster.launcher import host_check
from keras_psplus.cluster.launcher.remote import RemoteHosts
from keras_psplus.cluster.ports import control_port

_PROGRAM = "import sys; exec(eval(sys.stdin.readline()))"
_MOST_OFFSET = 1.0
_LOOK_SHARE = 0.6
# Seconds for one link, and for all, where several wait for each other.
_LINK_SECONDS, _LINKS_SECONDS = 1.0, 3.0
_SLOW_BITS = 100e6
_SHOWN_LINKS = 6


class _Host:
    """A host's check under way, over one connection.

    Attributes:
        facts: What the host has said of itself, with `offset`, its clock's, in seconds.
        problem: Why there is no answer.
    """

    def __init__(
        self, command: Sequence[str], ports: Sequence[int], link_seconds: float, seconds: float
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.problem: str | None = None
        self._command, now = list(command), time.monotonic()
        # One that is silent leaves the others time for their links.
        self._look_until, self._deadline = now + _LOOK_SHARE * seconds, now + seconds
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        program = inspect.getsource(host_check) + f"\nmain({list(ports)!r}, {link_seconds!r})\n"
        self._say(repr(program))

    def look(self) -> None:
        """Waits for what the host has."""
        if (said := self._line(self._look_until)) is not None:
            # Its answer took at most the time of a message.
            self.facts = {**said, "offset": said["time"] - time.time()}

    def reach(self, addresses: Sequence[tuple[str, int]]) -> dict[str, str]:
        """Has the host connect to addresses; returns why it cannot, by address."""
        self._say(json.dumps(["reach", addresses]))
        return self._line(self._deadline) or {}

    def measure(self, what: str, address: tuple[str, int]) -> dict[str, float] | None:
        """Has the host measure a link; None without an answer in time."""
        self._say(json.dumps([what, address]))
        return self._line(self._deadline)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout and self._process.stderr
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            pipe.close()
        self._process.kill()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except OSError:
            pass  # Its own output says why.

    def _line(self, deadline: float) -> dict[str, Any] | None:
        """The next line of JSON; None with the problem noted."""
        assert self._process.stdout is not None and self._process.stderr is not None
        text = b""
        # Lines that a login's own files print may come first.
        while not (lines := [line for line in text.split(b"\n")[:-1] if line[:1] == b"{"]):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self.problem = "does not answer in time"
                return None
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
                last = said[-1] if said else f"exit code {self._process.wait()}"
                self.problem = f"{last} (of `{shlex.join(self._command[:-1])}`)"
                return None
            text += data
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def check(
    hosts: Sequence[str], ssh: Sequence[str] | None, python: str | None, seconds: float
) -> int:
    """Prints a table of the hosts and the problems found; returns the exit code.

    Args:
        hosts: Host of each task, as for `RemoteHosts`.
        seconds: How long all may take.
    """
    way = RemoteHosts(hosts, ssh, python, seconds)
    try:
        tasks = plan_tasks(workers=len(hosts), hosts=way.addresses)
    except ValueError as error:
        raise UsageError(str(error)) from None
    way.place(tasks)
    ports = _ports(tasks)
    first: dict[str, int] = {}
    for rank, task in enumerate(tasks):
        first.setdefault(split_address(task.config.address or "")[0], rank)
    names = list(first)
    link_seconds = min(_LINK_SECONDS, _LINKS_SECONDS / max(1, len(names) - 1))
    checks = {
        name: _Host(way.command(rank, ["-u", "-c", _PROGRAM]), ports[name], link_seconds, seconds)
        for name, rank in first.items()
    }
    try:
        with concurrent.futures.ThreadPoolExecutor(len(checks)) as pool:
            list(pool.map(lambda each: each.look(), checks.values()))
            answering = {name: each for name, each in checks.items() if each.facts}

            def reach(name: str) -> dict[str, str]:
                others = [(o, port) for o in answering if o != name for port in ports[o]]
                return answering[name].reach(others)

            unreached = dict(zip(answering, pool.map(reach, answering)))
            # Of each host, a port on which its check listens.
            open_ports = {
                name: port
                for name, each in answering.items()
                for port in ports[name]
                if str(port) not in each.facts["taken"]
            }
            links = _measure(answering, open_ports, unreached, pool)
    finally:
        for each in checks.values():
            each.close()
    problems = [f"{name}: {checks[name].problem}" for name in names if not checks[name].facts]
    facts = {name: each.facts for name, each in answering.items()}
    for name in names:
        print(f"  {name:<16} {_row(facts.get(name))}")
    problems += _show_links(links) + _problems(facts, unreached)
    print(f"\n{len(problems)} problem(s):" if problems else "\nNo problem found.")
    for number, problem in enumerate(problems, 1):
        print(f"  {number}. {problem}")
    return int(bool(problems))


def _ports(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Ports of each host's tasks: TensorFlow's, and those of the control channel."""
    found: dict[str, list[int]] = {}
    for task in tasks:
        host, port = split_address(task.config.address or "")
        found.setdefault(host, []).extend([port, control_port(port)])
    return found


def _measure(
    hosts: Mapping[str, _Host],
    ports: Mapping[str, int],
    unreached: Mapping[str, Mapping[str, str]],
    pool: concurrent.futures.Executor,
) -> dict[tuple[str, str], dict[str, float]]:
    """Links by sender and receiver, measured while each host sends to one."""
    names = list(hosts)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for distance in range(1, len(names)):
        pairs = [
            (name, other)
            for name, other in zip(names, names[distance:] + names[:distance])
            if other in ports and host_check.name_of((other, ports[other])) not in unreached[name]
        ]
        # Round trips of a link that is full would be longer.
        for what in ("trip", "send"):

            def measure(pair: tuple[str, str], what: str = what) -> dict[str, float] | None:
                return hosts[pair[0]].measure(what, (pair[1], ports[pair[1]]))

            for pair, link in zip(pairs, list(pool.map(measure, pairs))):
                if link is not None:
                    found.setdefault(pair, {}).update(link)
    return found


def _show_links(links: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """Prints the slowest links, and what to do where they are slow; returns the problems."""
    wanted = "bits_per_second", "latency"
    measured = {
        " -> ".join(pair): link for pair, link in links.items() if all(map(link.get, wanted))
    }
    ordered = sorted(measured.items(), key=lambda item: item[1]["bits_per_second"])
    for pair, link in ordered[:_SHOWN_LINKS]:
        rate, latency = link["bits_per_second"], link["latency"]
        print(f"  {pair:<33} {_rate(rate)}, round trip {1e3 * latency:.1f} ms")
    if len(ordered) > _SHOWN_LINKS:
        print(f"  {len(ordered) - _SHOWN_LINKS} links between other hosts are faster")
    if ordered and (rate := ordered[0][1]["bits_per_second"]) < _SLOW_BITS:
        print(
            f"\nwarning: {ordered[0][0]} has {_rate(rate)}: gradients of a million weights take "
            f"{32e6 / max(rate, 1.0):.1f} s in each step. `--compression powersgd:4` sends less, "
            "`--updates diloco:100` less often"
        )
    return [
        f"{name} cannot send data to {other}, though it connects: look at the MTU of the network"
        for (name, other), link in links.items()
        if link.get("bits_per_second") == 0
    ]


def _rate(bits_per_second: float) -> str:
    return f"{1e-6 * bits_per_second:,.{0 if bits_per_second >= 10e6 else 1}f} Mbit/s"


def _row(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "NO ANSWER"
    versions = ", ".join(f"{name} {v or 'MISSING'}" for name, v in facts["versions"].items())
    offset = f"clock {facts['offset']:+.2f} s"
    return (
        f"{facts['node']}, {facts['cores']} cores, Python {facts['python']}, {versions}, {offset}"
    )


def _problems(
    facts: Mapping[str, Mapping[str, Any]], unreached: Mapping[str, Mapping[str, str]]
) -> list[str]:
    problems = []
    for name, own in facts.items():
        for package, version in own["versions"].items():
            if version is None:
                problems.append(f"{name} has no {package}: install it there, or --remote_python")
        for port, why in own["taken"].items():
            problems.append(f"{name} cannot listen on port {port}: {why}")
        for address, why in unreached[name].items():
            problems.append(
                f"{name} cannot reach {address}: {why}: open the port, or name another host"
            )
        if abs(own["offset"]) > _MOST_OFFSET:
            problems.append(
                f"the clock of {name} is {own['offset']:+.1f} s off: logs and traces will be, too"
            )
    for package in host_check.PACKAGES.split():
        found = {name: own["versions"][package] for name, own in facts.items()}
        if len(set(found.values()) - {None}) > 1:
            listed = ", ".join(f"{name} has {version}" for name, version in found.items())
            problems.append(f"versions of {package} differ: {listed}")
    pythons = {own["python"].rpartition(".")[0] for own in facts.values()}
    if len(pythons) > 1:
        problems.append(f"versions of Python differ: {', '.join(sorted(pythons))}")
    return problems
