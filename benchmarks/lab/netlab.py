"""A few hosts with slow links between them, on one Linux machine.

Every host is a network namespace with one interface, 10.77.0.<rank + 1>, that is plugged into a
bridge. The bridge has a namespace of its own, so nothing is seen outside, and several labs can run
at once. The kernel drops the namespaces when the processes that hold them end, in whatever way.

The rate is that of a full-duplex link: it holds for what a host sends and for what it receives, and
can be changed while the hosts are at work. The
bucket of the filter is small (a quarter of a millisecond), so that short messages do not ride for
free. Needs root, and the programs of iproute2 and util-linux.
"""

import os
import pathlib
import re
import subprocess
import sys
import time

_DELAY = pathlib.Path(__file__).with_name("netlab_delay.py")
_NETWORK = "10.77.0."
_PORT = 2222
_MTU = 1500
_LARGEST = 65536  # bytes that the kernel passes on in one piece
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


class _Hosts:
    """What starts tasks, and ends them with itself."""

    def __init__(self, hosts):
        self.hosts = hosts
        self._processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()
        self._processes = []

    def start(self, rank, argv, core=None, env=None, **kwargs):
        """Starts a command on a host.

        Args:
            rank: The host's.
            argv: The command, a list of strings.
            core: The processor core it has to stay on; None for any.
            env: Dict of environment variables beside this process's own.
            **kwargs: Further arguments of `subprocess.Popen`.

        Returns:
            A `subprocess.Popen`. It ends with the lab.
        """
        variables = {k: v for k, v in os.environ.items() if k.lower() not in _PROXIES}
        pin = [] if core is None else ["taskset", "-c", str(core)]
        argv = [*self._enter(rank), *pin, *argv]
        return self._run(argv, env={**variables, **(env or {})}, **kwargs)

    def _enter(self, rank):
        """The command that runs another on a host."""
        return []

    def _run(self, argv, **kwargs):
        until_our_end = ["setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen([*until_our_end, *argv], stdin=subprocess.DEVNULL, **kwargs)
        self._processes.append(process)
        return process


class Loopback(_Hosts):
    """Hosts in name only: all tasks share this machine's loopback, which has no limit.

    For those who may make no network namespaces. Its counters are those of all tasks together, and
    of whatever else uses the loopback.

    Args:
        hosts: Number of hosts.
    """

    interface = "lo"
    counters = "/proc/net/dev"

    def __init__(self, hosts):
        # Not above: the Python that has PyTorch imports this module, too, and lacks Keras.
        from keras_psplus.cluster.ports import free_ports

        super().__init__(hosts)
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(hosts)]

    def address(self, rank):
        """Where a host's task listens."""
        return self._addresses[rank]

    def device(self, rank):
        """What counts a host's bytes among `counters`."""
        return "lo"

    def set_rate(self, rate):
        """Changes nothing: there are no links."""


class Lab(_Hosts):
    """Hosts on one machine, each with a link of its own to a switch.

    Example:

    ```python
    with Lab(hosts=2, delay=1e-4) as lab:
        lab.set_rate(1e9)
        processes = [lab.start(rank, ["curl", lab.address(1 - rank)]) for rank in range(2)]
        for process in processes:
            process.wait()
    ```

    Args:
        hosts: Number of hosts.
        delay: Seconds that each packet takes from host to host; 0 for what the machine takes.
    """

    interface = "eth0"

    def __init__(self, hosts, delay=0.0):
        super().__init__(hosts)
        self.delay = delay
        self._namespaces, self._switch, self._rate = [], None, None

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def address(self, rank):
        """Where a host's task listens."""
        return f"{_ip(rank)}:{_PORT}"

    @property
    def counters(self):
        """Path of the file, readable in all hosts, with what each has sent; see `traffic`."""
        return f"/proc/{self._switch}/net/dev"

    def device(self, rank):
        """What counts a host's bytes among `counters`."""
        return f"h{rank}"

    def set_rate(self, rate):
        """Sets the rate of all links.

        Args:
            rate: Bits per second of each host's link, both ways; None for no limit.
        """
        if rate == self._rate:
            return
        self._rate = rate
        for rank, host in enumerate(self._namespaces):
            for pid, device in ((host, "eth0"), (self._switch, f"h{rank}")):
                self._limit(pid, device) if rate else self._free(pid, device)
            # Or open connections would go on with pieces as large as before.
            _set(host, "ip route flush cache")

    def _enter(self, rank):
        return _inside(self._namespaces[rank])

    def _build(self):
        self._switch = self._namespace()
        _set(self._switch, f"ip link add br0 mtu {_MTU} type bridge")
        _set(self._switch, "ip link set br0 addrgenmode none up")
        for rank in range(self.hosts):
            host = self._namespace()
            self._namespaces.append(host)
            peer = f"peer name eth0 mtu {_MTU} netns {host}"
            _set(self._switch, f"ip link add h{rank} mtu {_MTU} type veth {peer}")
            _set(self._switch, f"ip link set h{rank} master br0 addrgenmode none up")
            _set(host, "ip link set lo up")
            _set(host, f"ip address add {_ip(rank)}/24 dev eth0")
            _set(host, "ip link set eth0 addrgenmode none up")
        if self.delay:
            pids = map(str, self._namespaces)
            delayer = self._run(
                [sys.executable, str(_DELAY), str(self.delay), *pids], stdout=subprocess.PIPE
            )
            if delayer.stdout.readline() != b"ready\n":
                raise RuntimeError(f"Packets cannot be delayed here. Received: delay={self.delay}")

    def _namespace(self):
        """Starts a process that holds a new network namespace; its process id."""
        process = self._run(["unshare", "--net", "sleep", "infinity"], stderr=subprocess.DEVNULL)
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

    def _limit(self, pid, device):
        burst = max(4 * (_MTU + 14), int(self._rate / 8 * 0.25e-3))
        limit = max(512 << 10, int(self._rate / 8 * 20e-3))
        # Or the filter would have to cut packets up, which costs much processor time.
        largest = min(_LARGEST, int(burst * 0.94) - 400)
        _set(pid, f"ip link set dev {device} gso_max_size {largest}")
        shape = f"tbf rate {int(self._rate)} burst {burst} limit {limit}"
        _set(pid, f"tc qdisc replace dev {device} root {shape}")

    def _free(self, pid, device):
        _set(pid, f"tc qdisc del dev {device} root")
        _set(pid, f"ip link set dev {device} gso_max_size {_LARGEST}")


def why_not():
    """Why no `Lab` can be made here; None if one can."""
    try:
        with Lab(2) as lab:
            lab.set_rate(1e9)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return str(error)
    return None


def traffic(counters, device):
    """Bytes that a host has sent and received.

    Args:
        counters: `Lab.counters`.
        device: `Lab.device` of the host.
    """
    line = re.search(rf"^\s*{device}:(.*)", pathlib.Path(counters).read_text(), re.MULTILINE)
    # 8 numbers of what came to the switch's port, 8 of what went.
    numbers = [int(number) for number in line[1].split()]
    return numbers[0], numbers[8]


def parse_rate(text):
    """Bits per second of `"100mbit"`, `"1gbit"` and the like; None of `"loopback"`.

    Raises:
        ValueError: If it is something else.
    """
    match = re.fullmatch(r"([\d.]+)([kmg]?)bit", text)
    if text != "loopback" and not match:
        raise ValueError(f"A rate is '100mbit', '1gbit' or 'loopback'. Received: {text!r}")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else None


def _ip(rank):
    return f"{_NETWORK}{rank + 1}"


def _is_in(pid, namespace):
    """Whether a process is in a namespace still, or has ended."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), namespace)
    except OSError:
        return True


def _inside(pid):
    return ["nsenter", "-t", str(pid), "-n"]


def _set(pid, command):
    subprocess.run([*_inside(pid), *command.split()], check=True, capture_output=True, text=True)
