"""Delays what hosts send to others, by the lines `SECONDS ADDRESS PID...` that it reads.

ADDRESS is the sender's, and each PID is of a process in a network namespace that receives. Such a
line can come again, with another time. Prints `done` after each, and runs until it is killed.

For kernels without netem, which would be simpler: a namespace that receives gets an iptables rule
for each sender, which hands packets that arrive on eth0 to a queue, and this process lets them go
when their time has come. (Where they leave, the sender's TCP would count them as still to be sent,
and send less.) The rules are made by setsockopt, so that no iptables program is needed.
"""

import collections
import ctypes
import gc
import os
import select
import socket
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_SOL_NETLINK, _NETLINK_NETFILTER = 270, 12
_NO_ENOBUFS, _SO_RCVBUFFORCE = 5, 33
_SO_GET_INFO = _SO_SET_REPLACE = 64
_DELIVER_AT_ONCE = -2  # "accept" as the target of a rule
_ACCEPT = 1
# Message types of the queue's subsystem, 3.
_PACKET, _VERDICT_BATCH, _CONFIG = 0x300, 0x303, 0x302

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def _enter(pid: str) -> None:
    with open(f"/proc/{pid}/ns/net") as file:
        _checked(_libc.setns(file.fileno(), _CLONE_NEWNET), "setns")


def _entry(target: bytes, sender: str | None = None) -> bytes:
    """Rule of a table, for packets from one sender that enter by eth0.

    Without a sender, for all packets.
    """
    address = bytearray(84)
    if sender:
        name = b"eth0\0"
        address[:4], address[8:12] = socket.inet_aton(sender), b"\xff" * 4
        address[16 : 16 + len(name)] = name
        address[48 : 48 + len(name)] = b"\xff" * len(name)
    sizes = struct.pack("=IHHI", 0, 112, 112 + len(target), 0)
    return bytes(address) + sizes + bytes(16) + target


def _target(name: bytes, data: bytes) -> bytes:
    size = 32 + (len(data) + 7) // 8 * 8
    return struct.pack("=H29sB", size, name, 0) + data.ljust(size - 32, b"\0")


def _set_rules(senders: list[str]) -> None:
    """Hands what each sender sends to this process's namespace to the queue of its number.

    As `iptables -t filter -A INPUT -s SENDER -i eth0 -j NFQUEUE --queue-num NUMBER`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        info = ctypes.create_string_buffer(b"filter".ljust(84, b"\0"), 84)
        length = ctypes.c_uint32(84)
        got = _libc.getsockopt(raw.fileno(), 0, _SO_GET_INFO, info, ctypes.byref(length))
        _checked(got, "the kernel has no iptables")
        (old_entries,) = struct.unpack_from("=I", info.raw, 76)
        targets = [_target(b"NFQUEUE", struct.pack("=H", number)) for number in range(len(senders))]
        rules = b"".join(map(_entry, targets, senders))
        accept = _entry(_target(b"", struct.pack("=i", _DELIVER_AT_ONCE)))
        error = _entry(_target(b"ERROR", b"ERROR".ljust(30, b"\0")))
        entries = rules + 3 * accept + error
        a, b = len(rules), len(accept)
        hooks, underflows = [0, 0, a + b, a + 2 * b, 0], [0, a, a + b, a + 2 * b, 0]
        counters = ctypes.create_string_buffer(16 * old_entries)
        sizes = (len(senders) + 4, len(entries))
        table = struct.pack(
            *("=32sIII5I5II", b"filter", 0xE, *sizes, *hooks, *underflows, old_entries)
        )
        table += struct.pack("=Q", ctypes.addressof(counters)) + entries
        raw.setsockopt(0, _SO_SET_REPLACE, table)


def _message(kind: int, flags: int, queue: int, *attributes: tuple[int, bytes]) -> bytes:
    body = struct.pack(">BBH", 0, 0, queue)
    for number, data in attributes:
        body += struct.pack("=HH", len(data) + 4, number) + data + bytes(-len(data) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


class _Queue:
    """The packets that wait in a queue of the namespace this process is in."""

    def __init__(self, number: int) -> None:
        self.delay, self._number = 0.0, number
        # When each is due, and its number.
        self.waiting: collections.deque[tuple[float, int]] = collections.deque()
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 16 << 20)
        self.socket.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
        self.socket.bind((0, 0))
        for attributes in (
            [(1, struct.pack(">BBH", 1, 0, socket.AF_INET))],  # this queue is ours
            [(2, struct.pack(">IB", 0, 1))],  # packets' headers are enough
            [(3, struct.pack(">I", 1 << 20))],  # its length
            [(4, struct.pack(">I", 5)), (5, struct.pack(">I", 5))],  # no drops, large packets
        ):
            self.socket.send(_message(_CONFIG, 5, number, *attributes))
            (error,) = struct.unpack_from("=i", self.socket.recv(4096), 16)
            if error:
                raise OSError(-error, "the kernel has no queue for packets")
        self.socket.setblocking(False)

    def take(self, now: float) -> None:
        """Notes the packets that have come."""
        due = now + self.delay
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                return
            start = 0
            while start + 16 <= len(data):
                length, kind = struct.unpack_from("=IH", data, start)
                if kind == _PACKET:  # its number comes first
                    self.waiting.append((due, struct.unpack_from(">I", data, start + 24)[0]))
                start += (length + 3) & ~3

    def release(self, now: float) -> None:
        """Lets all packets go that are due."""
        last = None
        while self.waiting and self.waiting[0][0] <= now:
            last = self.waiting.popleft()[1]
        if last is not None:
            verdict = (2, struct.pack(">II", _ACCEPT, last))
            self.socket.send(_message(_VERDICT_BATCH, 1, self._number, verdict))


class _Delays:
    """All queues, by what reads them and by who sends to whom."""

    def __init__(self) -> None:
        self.by_file: dict[int, _Queue] = {}
        # By the process id of the receiver, and then by the address of the sender.
        self._by_way: dict[str, dict[str, _Queue]] = {}

    def set(self, seconds: float, sender: str, receivers: list[str]) -> None:
        """Sets the delay on the way from a sender to some receivers."""
        for pid in receivers:
            queues = self._by_way.setdefault(pid, {})
            if sender not in queues:
                _enter(pid)
                queue = queues[sender] = _Queue(len(queues))
                self.by_file[queue.socket.fileno()] = queue
                _set_rules(list(queues))
            queues[sender].delay = seconds


def main() -> None:
    """Delays packets until this process is ended; rules come by standard input."""
    delays, lines = _Delays(), sys.stdin.fileno()
    # A packet's time must not depend on what else the machine does.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    gc.disable()
    while True:
        queues = delays.by_file
        due = [queue.waiting[0][0] for queue in queues.values() if queue.waiting]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for number in select.select([lines, *queues], [], [], wait)[0]:
            if number != lines:
                queues[number].take(time.monotonic())
                continue
            line = sys.stdin.buffer.raw.readline().decode()  # type: ignore[union-attr]
            if not line:
                return
            seconds, sender, *receivers = line.split()
            delays.set(float(seconds), sender, receivers)
            print("done", flush=True)
            break
        now = time.monotonic() + 2e-5  # what a further call of select would take
        for queue in queues.values():
            queue.release(now)


if __name__ == "__main__":
    main()
