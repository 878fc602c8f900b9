import os
import socket

import pytest

from keras_psplus.cluster import ports
from keras_psplus.cluster.ports import free_ports, port_holder


def test_ports_are_distinct_and_can_be_bound():
    chosen = free_ports(20)
    assert len(set(chosen)) == 20
    for port in chosen:
        for number in (port, ports.control_port(port)):
            with socket.socket() as trial:
                trial.bind(("127.0.0.1", number))
    assert ports.control_address("[::1]:2222") == "[::1]:3222"
    assert ports.control_port(65_000) == 64_000


def test_ports_lie_outside_the_ephemeral_range(monkeypatch):
    monkeypatch.setattr(ports, "_ephemeral_range", lambda: (32768, 60999))
    chosen = {port for port in free_ports(20)} | set(ports._candidates())
    for port in chosen | {ports.control_port(port) for port in chosen}:
        assert not 32768 <= port <= 60999


def test_kernel_chooses_where_everything_is_ephemeral(monkeypatch):
    monkeypatch.setattr(ports, "_ephemeral_range", lambda: (1024, 65535))
    assert len(set(free_ports(5))) == 5


def test_taken_ports_are_left_alone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_candidates", lambda: [taken])
        with pytest.raises(RuntimeError, match=r"0 of 1 free .*Received: n=1"):
            free_ports(1)


def test_launchers_that_start_together_choose_other_ports(monkeypatch):
    chosen = free_ports(1)
    monkeypatch.setattr(ports, "_candidates", lambda: chosen)
    with pytest.raises(RuntimeError, match="0 of 1 free"):
        free_ports(1)
    # Their servers listen by now.
    monkeypatch.setattr(ports, "_RESERVED_SECONDS", -1.0)
    assert free_ports(1) == chosen


def test_unknown_host_is_an_error():
    with pytest.raises(RuntimeError, match="Received: host='no-such-host.invalid'"):
        free_ports(1, "no-such-host.invalid")


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux's /proc")
def test_port_holder_names_the_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"process {os.getpid()}" in port_holder(server.getsockname()[1])
    assert port_holder(1) is None
