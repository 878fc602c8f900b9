"""A few hosts with slow links between them, on one Linux machine.

Every host is a network namespace with one interface, 10.77.0.<rank + 1>, that is plugged into a
bridge. The bridge has its own namespace, so nothing is seen outside, and several labs can run
at once. With several racks, each has a bridge, and one link to another bridge, which joins them.
Files and Unix sockets are those of the machine. The kernel drops the namespaces when the processes
that hold them end, in whatever way.

The rate is that of a full-duplex link: it holds for what a host sends and for what it receives, and
can be changed while the hosts are at work. The
bucket of the filter is small (a quarter of a millisecond), so that short messages do not ride for
free. Needs root, and the programs of iproute2 and util-linux.
"""

import itertools
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

_DELAY = pathlib.Path(__file__).with_name("netlab_delay.py")
_NETWORK = "10.77.0."
_PORT = 2222
_MTU = 1500
_LARGEST = 65536  # bytes that the kernel passes on in one piece
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


class Hosts:
    """Hosts that start tasks, and end them on exit."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()
        self._processes = []

    def start(
        self,
        rank: int,
        argv: Sequence[str],
        core: int | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host.

        Args:
            argv: The command, a list of strings.
            core: The processor core it has to stay on; None for any.
            env: Dict of environment variables beside this process's own.
            **kwargs: Further arguments of `subprocess.Popen`.

        Returns:
            A `subprocess.Popen`. It ends with the lab.
        """
        pin = [] if core is None else ["taskset", "-c", str(core)]
        argv = [*self.inside(rank), *pin, *argv]
        return self._run(argv, env={**self.environment(os.environ), **(env or {})}, **kwargs)

    def inside(self, rank: int) -> list[str]:
        """The command, a list of strings, that becomes the one that follows, on a host."""
        return []

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """A copy of an environment, without the proxies, which no host reaches."""
        return {name: value for name, value in environ.items() if name.lower() not in _PROXIES}

    def _run(self, argv: list[str], **kwargs: Any) -> subprocess.Popen[Any]:
        kwargs = {"stdin": subprocess.DEVNULL, **kwargs}
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *argv], **kwargs)
        self._processes.append(process)
        return process


class Lab(Hosts):
    """Hosts on one machine, each with its own link to a switch.

    Example:

    ```python
    with Lab(hosts=2, delay=1e-4) as lab:
        lab.set_rate(1e9)
        processes = [lab.start(rank, ["curl", lab.address(1 - rank)]) for rank in range(2)]
        for process in processes:
            process.wait()
    ```

    Args:
        delay: Seconds that each packet takes from host to host; 0 for what the machine takes.
        racks: Number of racks, among which hosts are divided in order.
        uplink: Bits per second of each rack's link to the others, both ways; None for no limit.
    """

    interface = "eth0"

    def __init__(
        self, hosts: int, delay: float = 0.0, racks: int = 1, uplink: float | None = None
    ) -> None:
        super().__init__(hosts)
        self.delay, self.racks, self._uplink = delay, racks, uplink
        self._namespaces: list[int] = []
        self._switch: int | None = None
        self._rate: float | None = None
        self._delayer: Any = None  # a `subprocess.Popen` with pipes
        self._lock = threading.Lock()
        self._handles = itertools.count(1)

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # from here on, a process id may be another process's
            self._namespaces, self._switch, self._delayer, self._rate = [], None, None, None
        super().__exit__()

    def address(self, rank: int) -> str:
        """Address on which a host's task listens."""
        return f"{_ip(rank)}:{_PORT}"

    @property
    def addresses(self) -> list[str]:
        """Those of all hosts."""
        return [self.address(rank) for rank in range(self.hosts)]

    @property
    def counters(self) -> str:
        """Path of the file, readable in all hosts, with what each has sent."""
        return f"/proc/{self._switch}/net/dev"

    def device(self, rank: int) -> str:
        """Key of a host's byte counter in `counters`."""
        return f"h{rank}"

    def rack(self, rank: int) -> int:
        """The number of the rack that a host is in."""
        return rank * self.racks // self.hosts

    @property
    def uplinks(self) -> list[str]:
        """Keys in `counters` of the byte counters of each rack's link to the others."""
        return [f"u{rack}" for rack in range(self.racks)] if self.racks > 1 else []

    def set_rate(self, rate: float | None) -> None:
        """Sets the rate of all links.

        Args:
            rate: Bits per second of each host's link, both ways; None for no limit.
        """
        if rate == self._rate:
            return
        self._rate = rate
        for rank, host in enumerate(self._namespaces):
            assert self._switch is not None
            for pid, device in ((host, "eth0"), (self._switch, f"h{rank}")):
                self._limit(pid, device, rate) if rate else self._free(pid, device)
            # Or open connections would go on with pieces as large as before.
            _set(host, "ip route flush cache")

    def set_link(self, rank: int, up: bool) -> None:
        """Cuts a host off from all others, or ends that.

        Args:
            up: Whether its link is there. Does nothing once the lab has ended.
        """
        with self._lock:
            if self._switch is not None:
                _set(self._switch, f"ip link set h{rank} {'up' if up else 'down'}")

    def set_delay(self, rank: int, seconds: float) -> None:
        """Sets how much longer all that a host sends to the others is to take.

        Args:
            seconds: The delay. Does nothing once the lab has ended.

        Raises:
            RuntimeError: If this kernel cannot do it.
        """
        with self._lock:
            if self._switch is None:
                return
            others = [str(pid) for pid in self._namespaces if pid != self._namespaces[rank]]
            if self._delayer is None:
                pipe = subprocess.PIPE
                self._delayer = self._hold(
                    [sys.executable, "-I", "-S", str(_DELAY)], stdin=pipe, stdout=pipe, stderr=pipe
                )
            problem = ""
            try:
                self._delayer.stdin.write(f"{seconds} {_ip(rank)} {' '.join(others)}\n".encode())
                self._delayer.stdin.flush()
                if self._delayer.stdout.readline() == b"done\n":
                    return
                problem = self._delayer.stderr.read().decode().strip().rpartition("\n")[2]
            except OSError as error:
                problem = str(error)
            raise RuntimeError(f"Packets cannot be delayed: {problem}. Received: {seconds} s")

    def inside(self, rank: int) -> list[str]:
        return _inside(self._namespaces[rank])

    def _build(self) -> None:
        self._switch = self._namespace()
        for rack in range(self.racks):
            self._bridge(f"br{rack}")
        if self.racks > 1:
            self._bridge("core")
        for rack, uplink in enumerate(self.uplinks):
            peer = f"peer name c{rack} mtu {_MTU}"
            _set(self._switch, f"ip link add {uplink} mtu {_MTU} type veth {peer}")
            for device, bridge in ((uplink, f"br{rack}"), (f"c{rack}", "core")):
                _set(self._switch, f"ip link set {device} master {bridge} addrgenmode none up")
                if self._uplink:
                    self._limit(self._switch, device, self._uplink)
        for rank in range(self.hosts):
            host = self._namespace()
            self._namespaces.append(host)
            peer = f"peer name eth0 mtu {_MTU} netns {host}"
            _set(self._switch, f"ip link add h{rank} mtu {_MTU} type veth {peer}")
            bridge = f"br{self.rack(rank)}"
            _set(self._switch, f"ip link set h{rank} master {bridge} addrgenmode none up")
            _set(host, "ip link set lo up")
            _set(host, f"ip address add {_ip(rank)}/24 dev eth0")
            _set(host, "ip link set eth0 addrgenmode none up")
        if self.delay:
            for rank in range(self.hosts):
                self.set_delay(rank, self.delay)

    def _bridge(self, name: str) -> None:
        assert self._switch is not None
        _set(self._switch, f"ip link add {name} mtu {_MTU} type bridge")
        _set(self._switch, f"ip link set {name} addrgenmode none up")

    def _hold(self, argv: list[str], **kwargs: Any) -> subprocess.Popen[Any]:
        # Ctrl-C is for the tasks, which may need the network to end well.
        return self._run(argv, start_new_session=True, **kwargs)

    def _namespace(self) -> int:
        """Starts a process that holds a new network namespace; its process id."""
        process = self._hold(["unshare", "--net", "sleep", "infinity"], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10
        mine = os.stat("/proc/self/ns/net")
        while _is_in(process.pid, mine):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    "No network namespace can be made; are you root? "
                    f"Received: user id {os.geteuid()}"
                )
            time.sleep(0.01)
        return process.pid

    def _limit(self, pid: int, device: str, rate: float) -> None:
        burst = max(4 * (_MTU + 14), int(rate / 8 * 0.25e-3))
        limit = max(512 << 10, int(rate / 8 * 20e-3))
        # Or the filter would have to cut packets up, which costs much processor time.
        largest = min(_LARGEST, int(burst * 0.94) - 400)
        _set(pid, f"ip link set dev {device} gso_max_size {largest}")
        shape = f"tbf rate {int(rate)} burst {burst} limit {limit}"
        # A new filter, whose queue is empty: what waits in one that is changed may be larger than
        # the new burst, and would hold up the link for ever.
        handle = next(self._handles)
        _set(pid, f"tc qdisc replace dev {device} root handle {handle:x}: {shape}")

    def _free(self, pid: int, device: str) -> None:
        _set(pid, f"tc qdisc del dev {device} root")
        _set(pid, f"ip link set dev {device} gso_max_size {_LARGEST}")


def why_not(rate: float | None = None, delay: float = 0.0) -> str | None:
    """Reason why no `Lab` can be made here; None if one can.

    Args:
        rate: As of `Lab.set_rate`, to find out about rates as well.
        delay: As of `Lab`, to find out about delays as well.
    """
    try:
        with Lab(2, delay) as lab:
            lab.set_rate(rate)
            lab.set_link(0, up=False)
            lab.set_link(0, up=True)
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _ip(rank: int) -> str:
    return f"{_NETWORK}{rank + 1}"


def _is_in(pid: int, namespace: os.stat_result) -> bool:
    """Whether a process is in a namespace still, or has ended."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), namespace)
    except OSError:
        return True


def _inside(pid: int) -> list[str]:
    return ["nsenter", "-t", str(pid), "-n"]


def _set(pid: int, command: str) -> None:
    done = subprocess.run([*_inside(pid), *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{done.stderr.strip() or 'failed'}. Received: {command}")
