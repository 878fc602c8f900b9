"""A few hosts with slow links between them, on one Linux machine.

Every host is a network namespace with one interface, 10.77.0.<rank + 1>, that is plugged into a
bridge. The bridge has a namespace of its own, so nothing is seen outside, and several labs can run
at once. The kernel drops the namespaces when the processes that hold them end, in whatever way.

The rate is that of a full-duplex link: it holds for what a host sends and for what it receives. The
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
_MTU = 1500
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


class Lab:
    """Hosts on one machine, each with a link of its own to a switch.

    Example:

    ```python
    with Lab(hosts=2, rate=1e9, delay=1e-4) as lab:
        processes = [lab.start(rank, ["curl", lab.ip(1 - rank)]) for rank in range(2)]
        for process in processes:
            process.wait()
        print(lab.sent(0))
    ```

    Args:
        hosts: Number of hosts.
        rate: Bits per second of each host's link, both ways; None for no limit.
        delay: Seconds that each packet takes from host to host; 0 for what the machine takes.
    """

    def __init__(self, hosts, rate=None, delay=0.0):
        self.hosts, self.rate, self.delay = hosts, rate, delay
        self._processes, self._namespaces, self._switch = [], [], None

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()
        self._processes = []

    def ip(self, rank):
        """A host's address."""
        return f"{_NETWORK}{rank + 1}"

    @property
    def counters(self):
        """Path of the file, readable in all hosts, with what each has sent; see `sent_bytes`."""
        return f"/proc/{self._switch}/net/dev"

    def sent(self, rank):
        """Bytes that a host has sent, with all headers."""
        return sent_bytes(self.counters, rank)

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
        process = self._run(
            [*_inside(self._namespaces[rank]), *pin, *argv],
            env={**variables, **(env or {})},
            **kwargs,
        )
        return process

    def _build(self):
        self._switch = self._namespace()
        self._ip(self._switch, f"link add br0 mtu {_MTU} type bridge")
        self._ip(self._switch, "link set br0 addrgenmode none up")
        for rank in range(self.hosts):
            host = self._namespace()
            self._namespaces.append(host)
            peer = f"peer name eth0 mtu {_MTU} netns {host}"
            self._ip(self._switch, f"link add h{rank} mtu {_MTU} type veth {peer}")
            self._ip(self._switch, f"link set h{rank} master br0 addrgenmode none up")
            self._ip(host, "link set lo up")
            self._ip(host, f"address add {self.ip(rank)}/24 dev eth0")
            if self.rate:
                self._limit(host, "eth0")
                self._limit(self._switch, f"h{rank}")
            self._ip(host, "link set eth0 addrgenmode none up")
        if self.delay:
            pids = map(str, self._namespaces)
            delayer = self._run(
                [sys.executable, str(_DELAY), str(self.delay), *pids], stdout=subprocess.PIPE
            )
            if delayer.stdout.readline() != b"ready\n":
                raise RuntimeError(f"Packets cannot be delayed here. Received: delay={self.delay}")

    def _namespace(self):
        """Starts a process that holds a new network namespace; its process id."""
        process = self._run(["unshare", "--net", "sleep", "infinity"])
        end = time.monotonic() + 10
        mine = os.stat("/proc/self/ns/net")
        while os.path.samestat(os.stat(f"/proc/{process.pid}/ns/net"), mine):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"No network namespace; are you root? Received: {os.geteuid()=}")
            time.sleep(0.01)
        return process.pid

    def _limit(self, pid, device):
        burst = max(4 * (_MTU + 14), int(self.rate / 8 * 0.25e-3))
        limit = max(512 << 10, int(self.rate / 8 * 20e-3))
        # Or the filter would have to cut packets up, which costs much processor time.
        largest = min(65536, int(burst * 0.94) - 400)
        self._ip(pid, f"link set dev {device} gso_max_size {largest}")
        shape = f"qdisc add dev {device} root tbf rate {int(self.rate)} burst {burst} limit {limit}"
        subprocess.run([*_inside(pid), "tc", *shape.split()], check=True)

    def _ip(self, pid, command):
        subprocess.run([*_inside(pid), "ip", *command.split()], check=True)

    def _run(self, argv, **kwargs):
        until_our_end = ["setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen([*until_our_end, *argv], stdin=subprocess.DEVNULL, **kwargs)
        self._processes.append(process)
        return process


def sent_bytes(counters, rank):
    """Bytes that a host has sent, by the counters of the switch's port.

    Args:
        counters: `Lab.counters`.
        rank: The host's.
    """
    return _port(counters, rank)[0]


def received_bytes(counters, rank):
    """Bytes that a host has received; see `sent_bytes`."""
    return _port(counters, rank)[8]


def _port(counters, rank):
    """What the kernel counts at a port of the switch: 8 numbers of what came, 8 of what went."""
    line = re.search(rf"^\s*h{rank}:(.*)", pathlib.Path(counters).read_text(), re.MULTILINE)
    return [int(number) for number in line[1].split()]


def parse_rate(text):
    """Bits per second of `"100mbit"`, `"1gbit"` and the like; None of `"none"`.

    Raises:
        ValueError: If it is something else.
    """
    match = re.fullmatch(r"([\d.]+)([kmg]?)bit", text.lower())
    if text.lower() != "none" and not match:
        raise ValueError(f"A rate is '100mbit', '1gbit' or 'none'. Received: {text!r}")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else None


def _inside(pid):
    return ["nsenter", "-t", str(pid), "-n"]
