"""Delays what network namespaces receive: `netlab_delay.py SECONDS PID...`.

For kernels without netem, which would be simpler: each namespace gets an iptables rule that hands
all packets which arrive on eth0 to a queue, and this process lets them go when their time has come.
The rule is made by setsockopt, so that no iptables program is needed. Prints `ready`, and runs
until it is killed.
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


def _checked(result, what):
    if result:
        raise OSError(ctypes.get_errno(), what)


def _enter(pid):
    with open(f"/proc/{pid}/ns/net") as file:
        _checked(_libc.setns(file.fileno(), _CLONE_NEWNET), "setns")


def _entry(target, interface=b""):
    """One rule of a table, for packets that come in by an interface, or all."""
    address = bytearray(84)
    if interface:
        name = interface + b"\0"
        address[16 : 16 + len(name)] = name
        address[48 : 48 + len(name)] = b"\xff" * len(name)
    sizes = struct.pack("=IHHI", 0, 112, 112 + len(target), 0)
    return bytes(address) + sizes + bytes(16) + target


def _target(name, data):
    size = 32 + (len(data) + 7) // 8 * 8
    return struct.pack("=H29sB", size, name, 0) + data.ljust(size - 32, b"\0")


def _queue_all_that_arrives():
    """As `iptables -t filter -A INPUT -i eth0 -j NFQUEUE` in this process's namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        info = ctypes.create_string_buffer(b"filter".ljust(84, b"\0"), 84)
        length = ctypes.c_uint32(84)
        got = _libc.getsockopt(raw.fileno(), 0, _SO_GET_INFO, info, ctypes.byref(length))
        _checked(got, "the kernel has no iptables")
        (old_entries,) = struct.unpack_from("=I", info.raw, 76)
        rule = _entry(_target(b"NFQUEUE", struct.pack("=H", 0)), b"eth0")
        accept = _entry(_target(b"", struct.pack("=i", _DELIVER_AT_ONCE)))
        error = _entry(_target(b"ERROR", b"ERROR".ljust(30, b"\0")))
        entries = rule + 3 * accept + error
        a, b = len(rule), len(accept)
        hooks, underflows = [0, 0, a + b, a + 2 * b, 0], [0, a, a + b, a + 2 * b, 0]
        counters = ctypes.create_string_buffer(16 * old_entries)
        table = struct.pack(
            *("=32sIII5I5II", b"filter", 0xE, 5, len(entries), *hooks, *underflows, old_entries)
        )
        table += struct.pack("=Q", ctypes.addressof(counters)) + entries
        raw.setsockopt(0, _SO_SET_REPLACE, table)


def _message(kind, flags, *attributes):
    body = struct.pack(">BBH", 0, 0, 0)
    for number, data in attributes:
        body += struct.pack("=HH", len(data) + 4, number) + data + bytes(-len(data) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


class _Queue:
    """The packets that wait in the queue of the namespace this process is in."""

    def __init__(self):
        self.waiting = collections.deque()
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
            self.socket.send(_message(_CONFIG, 5, *attributes))
            (error,) = struct.unpack_from("=i", self.socket.recv(4096), 16)
            if error:
                raise OSError(-error, "the kernel has no queue for packets")
        self.socket.setblocking(False)

    def take(self, due):
        """Notes the packets that have come, which are to go at `due`."""
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

    def release(self, now):
        """Lets all packets go that are due."""
        last = None
        while self.waiting and self.waiting[0][0] <= now:
            last = self.waiting.popleft()[1]
        if last is not None:
            verdict = (2, struct.pack(">II", _ACCEPT, last))
            self.socket.send(_message(_VERDICT_BATCH, 1, verdict))


def main():
    delay, pids = float(sys.argv[1]), sys.argv[2:]
    queues = {}
    for pid in pids:
        _enter(pid)
        queue = _Queue()
        queues[queue.socket.fileno()] = queue
        _queue_all_that_arrives()
    # A packet's time must not depend on what else the machine does.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    gc.disable()
    print("ready", flush=True)
    while True:
        due = [queue.waiting[0][0] for queue in queues.values() if queue.waiting]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for number in select.select(list(queues), [], [], wait)[0]:
            queues[number].take(time.monotonic() + delay)
        now = time.monotonic() + 2e-5  # what a further call of select would take
        for queue in queues.values():
            queue.release(now)


if __name__ == "__main__":
    main()
