"""Processes that learn each other's hosts from the first one."""

import pathlib
import re
import socket
import subprocess
import sys
import threading

import pytest

from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel import JobSecret
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.discovery.find import find_task_config
from keras_psplus.cluster.discovery.launchers import exchange_hosts
from keras_psplus.cluster.handshake import PeerIdentity
from keras_psplus.cluster.ports import free_ports
from tests.lab import netlab

JOB = pathlib.Path(__file__).with_name("slurm_job.py")


class Meeting(threading.Thread):
    def __init__(self, rank, size, address, timeout=30.0):
        super().__init__(daemon=True)
        self.arguments = rank, size, address, timeout
        self.start()

    def run(self):
        try:
            self.outcome = exchange_hosts(*self.arguments)
        except ClusterConfigError as error:
            self.outcome = f"{error}"

    def result(self):
        self.join(40)
        return self.outcome


def test_all_learn_all_hosts_whoever_comes_first():
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    early = [Meeting(rank, 4, address) for rank in (2, 1)]
    first = Meeting(0, 4, address)
    first.join(1.0)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    # One that knows how to call, and not of which job.
    stranger = PeerIdentity("rank 3", "", "host", 1, "x")
    answer = handshake.dial(address, stranger, JobSecret.of_text("another job"))
    assert not answer.is_proven and not answer.cluster
    assert first.is_alive()
    late = Meeting(3, 4, address)
    assert {meeting.result() for meeting in [first, *early, late]} == {("127.0.0.1",) * 4}
    # The port is that of the first task's server.
    socket.create_server(("", port)).close()


def test_who_does_not_come_is_named():
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    alone = Meeting(2, 3, address, timeout=0.5).result()
    assert alone.startswith("rank 2 of 3 could not learn the hosts of the others: waited 0.5 s for")
    assert f"rank 0 at {address}: connection refused" in alone
    others = [Meeting(rank, 3, address, timeout=1.0) for rank in (0, 2)]
    first, second = (meeting.result() for meeting in others)
    assert "waited 1 s for rank 1 to call" in first
    assert f"rank 0 at {address}: " in second and "KERAS_PSPLUS_HOSTS" in second
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot listen on port" in Meeting(0, 2, address).result()


def test_a_process_alone_says_so_in_time():
    (port,) = free_ports(1)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port - 1}"}
    with pytest.raises(ClusterConfigError, match=f"Received: 127.0.0.1:{port}$"):
        find_task_config(environ, timeout=0.5)


@pytest.mark.processes
@pytest.mark.extended
def test_processes_on_two_hosts_train_by_the_variables_of_torchrun():
    problem = netlab.why_not()
    if problem is not None:
        pytest.skip(f"no network namespaces here: {problem}")
    variables = {
        **{"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"},
        **{"LOCAL_WORLD_SIZE": "1", "KERAS_PSPLUS_STRATEGY": "all_reduce"},
        **{"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with netlab.Lab(2) as lab:
        processes = [
            lab.start(rank, [sys.executable, JOB], env={**variables, "RANK": f"{rank}"}, **pipes)
            for rank in range(2)
        ]
        texts = [process.communicate(timeout=560)[0] for process in processes]
    for rank, text in enumerate(texts):
        assert f"this is worker-{rank} of 2 worker, at 10.77.0.{rank + 1}:29501" in text, text
    # Once, by the one that has the job's log.
    assert [text.count("keras_psplus: data over") for text in texts] == [1, 0]
    losses = [re.search(r"^loss (\S+)", text, re.M)[1] for text in texts]
    assert losses[0] == losses[1]
