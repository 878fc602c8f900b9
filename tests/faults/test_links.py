"""What is done to links, and that it can be undone."""

import socket
import subprocess
import sys
import time

import pytest

from tests.lab import netlab
from tests.lab.faults import LinkFaults, parse

ECHO = """
import socket
server = socket.create_server(("", 2222))
print("up", flush=True)
connection, _ = server.accept()
while data := connection.recv(1):
    connection.sendall(data)
"""
# Sends a byte for each line it is told, and answers with the seconds until it was back.
ASK = """
import socket, sys, time
host, port = sys.argv[1].split(":")
connection = socket.create_connection((host, int(port)))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in sys.stdin:
    start = time.monotonic()
    connection.sendall(b".")
    connection.recv(1)
    print(time.monotonic() - start, flush=True)
"""


class Network:
    def __init__(self):
        self.done = []

    def set_link(self, rank, up):
        self.done.append((rank, "up" if up else "down"))

    def set_delay(self, rank, seconds):
        self.done.append((rank, seconds))


def test_faults_of_one_link_may_overlap():
    network, tasks = Network(), ["worker-0", "worker-1"]
    links = LinkFaults(network, tasks)
    text = "cut:worker1@step=1;cut:worker1@step=2;delay:worker1@step=3,ms=50;"
    cut, again, delay, more, other = parse(
        text + "delay:worker1@step=4,ms=25;delay:worker0@step=5,ms=1", tasks
    )
    for event in (cut, again, delay, more, other):
        links.begin(event)
    for event in (cut, delay, again, more):
        links.end(event)
    assert network.done == [
        *[(1, "down"), (1, "down"), (1, 0.05), (1, 0.075), (0, 0.001)],
        *[(1, "down"), (1, 0.025), (1, "up"), (1, 0)],
    ]


@pytest.mark.processes
def test_links_are_delayed_and_cut_while_they_are_used():
    problem = netlab.why_not(delay=1e-3)
    if problem is not None:
        pytest.skip(f"no network namespaces here: {problem}")
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with netlab.Lab(3) as lab:
        server = lab.start(0, [sys.executable, "-c", ECHO], **pipes)
        assert server.stdout.readline() == "up\n"
        argv = [sys.executable, "-c", ASK, lab.address(0)]
        client = lab.start(1, argv, stdin=subprocess.PIPE, **pipes)

        def seconds():
            print(file=client.stdin, flush=True)
            return float(client.stdout.readline())

        def quickest():
            return min(seconds() for _ in range(5))

        seconds()
        lab.set_delay(1, 0.2)
        assert seconds() >= 0.2
        lab.set_delay(0, 0.1)
        lab.set_delay(2, 9)  # on another way
        assert 0.3 <= quickest() < 9
        lab.set_delay(1, 0)
        seconds()  # which may follow one that is delayed still
        assert 0.1 <= quickest() < 0.3
        lab.set_link(1, up=False)
        print(file=client.stdin, flush=True)
        time.sleep(0.5)
        lab.set_link(1, up=True)
        assert float(client.stdout.readline()) >= 0.5
        assert quickest() >= 0.1
        # Only the lab's own network was touched.
        assert not any(name.startswith("h1") for _, name in socket.if_nameindex())
    lab.set_link(1, up=False)  # which has ended
    lab.set_delay(1, 1)


@pytest.mark.processes
def test_a_kernel_that_cannot_delay_is_told(monkeypatch):
    problem = netlab.why_not()
    if problem is not None:
        pytest.skip(f"no network namespaces here: {problem}")
    with netlab.Lab(2) as lab:
        lab._namespaces[0] = 2**22 + 1  # no process has this id
        with pytest.raises(RuntimeError, match="cannot be delayed: .*No such file.* 0.05 s"):
            lab.set_delay(1, 0.05)
