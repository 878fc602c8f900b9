import contextlib
import dataclasses
import json
import os
import socket
import threading
import time

import pytest

from keras_psplus.cluster import handshake, preflight
from keras_psplus.cluster.channel import ChannelClient, JobSecret
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.handshake import PeerIdentity, conflict
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.preflight import check_local_address, probe_peers, wait_for_cluster


def make_cluster(workers, ps=0):
    ports = free_ports(workers + ps)
    cluster = {"worker": tuple(f"127.0.0.1:{port}" for port in ports[:workers])}
    if ps:
        cluster["ps"] = tuple(f"127.0.0.1:{port}" for port in ports[workers:])
    return cluster


class Waiting(threading.Thread):
    """A task in a thread; `outcome` is None or the error."""

    def __init__(self, config, timeout=20.0, **kwargs):
        super().__init__(daemon=True)
        self.arguments = {"config": config, "timeout": timeout, "log": self.note, **kwargs}
        self.lines, self.outcome = [], "still waiting"
        self.start()

    def note(self, line):
        self.lines.append(line)

    def run(self):
        try:
            self.outcome = wait_for_cluster(**self.arguments) or None
        except Exception as error:
            self.outcome = error

    def result(self):
        self.join(30)
        return self.outcome


@pytest.fixture
def quick(monkeypatch):
    """Where a server is silent that is waited for."""
    monkeypatch.setattr(handshake, "ANSWER_TIMEOUT", 0.3)


def test_tasks_that_start_one_after_the_other_all_go_on():
    cluster = make_cluster(3)
    waiting = []
    for index in range(3):
        waiting.append(Waiting(TaskConfig(cluster, "worker", index)))
        time.sleep(0.2)
    # Those that are done play no server: the last ones must not need them any more.
    servers = []
    try:
        for task in waiting:
            task.join(0.7)
        for index, task in enumerate(waiting):  # TensorFlow comes up on the same ports
            if not task.is_alive():
                host, port = cluster["worker"][index].split(":")
                servers.append(socket.create_server((host, int(port))))
        assert [task.result() for task in waiting] == [None] * 3
    finally:
        for server in servers:
            server.close()


def test_alone_in_the_cluster():
    assert wait_for_cluster(TaskConfig(make_cluster(1), "worker", 0), timeout=5) == set()


def test_only_the_given_jobs_are_waited_for():
    config = TaskConfig(make_cluster(1, ps=1), "worker", 0)
    wait_for_cluster(config, timeout=5)
    with pytest.raises(ClusterStartupError, match="ps-0 at"):
        wait_for_cluster(config, job_types=("worker", "ps"), timeout=0.5, spare_workers=1)


def test_evaluator_waits_for_nobody():
    wait_for_cluster(TaskConfig(make_cluster(2), "evaluator", 0), timeout=1)


def test_port_in_use_names_the_holder(quick):
    config = TaskConfig(make_cluster(2), "worker", 0)
    with socket.create_server(("127.0.0.1", int(config.address.split(":")[1]))):
        with pytest.raises(ClusterStartupError) as error:
            wait_for_cluster(config, timeout=5)
        assert config.address in str(error.value)
        assert f"process {os.getpid()}" in str(error.value)
        assert "Make one strategy for each process" in str(error.value)
        with pytest.raises(ClusterStartupError):
            check_local_address(config)
    check_local_address(config)


def test_second_process_with_the_same_task_on_one_machine():
    config = TaskConfig(make_cluster(2), "worker", 0)
    first = Waiting(config, timeout=3)
    time.sleep(0.5)
    with pytest.raises(ClusterStartupError, match="worker-0 .*started already"):
        wait_for_cluster(config, timeout=3)
    assert first.result() is not None


def test_two_processes_that_claim_one_task_name_each_other():
    """As on two hosts: the second listens elsewhere and says hello to the first."""
    config = TaskConfig(make_cluster(2), "worker", 1)
    first = Waiting(config)
    problem = _dial_until_up(config.address, config)
    assert "two processes claim to be worker-1" in problem
    assert "two processes claim to be worker-1" in str(first.result())
    assert "Received: TF_CONFIG" in str(first.result())


def test_different_clusters_are_told_at_both_ends():
    cluster = make_cluster(2)
    other = {**cluster, "ps": ("127.0.0.1:1",)}
    waiting = [
        Waiting(TaskConfig(cluster, "worker", 0)),
        Waiting(TaskConfig(other, "worker", 1)),
    ]
    for task in waiting:
        message = str(task.result())
        assert isinstance(task.outcome, ClusterStartupError), message
        assert "different clusters" in message
        assert "worker-0 (process" in message and "worker-1 (process" in message


def test_task_at_anothers_address_is_named():
    mine = PeerIdentity("worker-0", "{}", "a", 1, "x")
    theirs = PeerIdentity("worker-2", "{}", "b", 2, "y")
    assert "worker-2 (process 2 on b) at the address of worker-1" in conflict(
        mine, theirs, expected="worker-1"
    )
    assert conflict(mine, theirs, expected="worker-2") is None


def test_other_versions_are_named():
    cluster = make_cluster(2)
    mine, theirs = (PeerIdentity.of(TaskConfig(cluster, "worker", rank)) for rank in range(2))
    assert conflict(mine, theirs) is None
    theirs = dataclasses.replace(theirs, versions=theirs.versions.replace("Keras 3", "Keras 4"))
    said = conflict(mine, theirs)
    assert "have different versions: worker-0 has keras_psplus " in said and "Keras 4" in said
    assert conflict(mine, dataclasses.replace(theirs, versions="")) is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 5000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100_000,
        b"",
    ],
)
def test_garbage_on_the_port_is_ignored(garbage):
    cluster = make_cluster(2)
    first = Waiting(TaskConfig(cluster, "worker", 0))
    host, port = cluster["worker"][0].split(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            stranger = socket.create_connection((host, int(port)), 2)
            break
        except OSError:
            assert time.monotonic() < deadline
    with stranger:
        try:
            stranger.sendall(garbage)
        except OSError:
            pass
        second = Waiting(TaskConfig(cluster, "worker", 1))
        assert (first.result(), second.result()) == (None, None)


@pytest.mark.parametrize("token", ["", "of this job"])
def test_strangers_who_know_the_protocol_are_not_listened_to(monkeypatch, capfd, token):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    cluster = make_cluster(2)
    first = Waiting(TaskConfig(cluster, "worker", 0))
    address = cluster["worker"][0]
    _dial_until_up(address, TaskConfig(cluster, "worker", 1))
    other = PeerIdentity("worker-1", "\x1b[31mother", "\x1b]0;x\x07", 1, "x")
    good = json.loads(PeerIdentity.of(TaskConfig(cluster, "worker", 1)).encode())
    texts = [
        other.encode(),
        # Who takes part in the same cluster, but has not its secret.
        json.dumps(good),
        *(json.dumps(good | {"pid": pid}) for pid in (float("inf"), -1, True, 10**400, "1", None)),
        *(json.dumps(good | {key: value}) for key in good for value in ({}, "\x1b[2J", 1.5)),
        "[" * 20_000,
        "9" * 5000,
        "",
        '"',
    ]
    for number, text in enumerate(texts):
        proof = ["", "0" * 64, "\ud800"][number % 3]
        opened, answer = _call(address, text, proof)
        # Nothing that would help is said to them: no address of the cluster.
        assert cluster["worker"][1] not in opened + answer
        assert not (token and json.loads(opened)["hint"])
        assert json.loads(answer) == {"error": ""}
    assert first.is_alive()
    second = Waiting(TaskConfig(cluster, "worker", 1))
    assert (first.result(), second.result()) == (None, None)
    shown = "".join(capfd.readouterr()) + "".join(first.lines)
    assert "Traceback" not in shown and "\x1b" not in shown
    check_local_address(TaskConfig(cluster, "worker", 0))


def test_hosts_of_strangers_are_named_when_a_task_is_missing():
    config = TaskConfig(make_cluster(2), "worker", 0)
    first = Waiting(config, timeout=1.5)
    other = TaskConfig({"worker": ("10.9.8.7:6", config.address)}, "worker", 1)
    assert "different clusters" in _dial_until_up(config.address, other)
    message = str(first.result())
    assert "Missing (not listened to, as they do not know this job's secret: 127.0.0.1)" in message
    assert "10.9.8.7" not in message


def test_a_task_with_another_token_is_no_task_of_the_job(monkeypatch):
    monkeypatch.setattr(preflight, "_LOG_EVERY", 0.5)
    monkeypatch.setenv(TOKEN_VARIABLE, "one")
    cluster = make_cluster(2)
    first = Waiting(TaskConfig(cluster, "worker", 0), timeout=3)
    _dial_until_up(cluster["worker"][0], TaskConfig(cluster, "worker", 1))
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    second = Waiting(TaskConfig(cluster, "worker", 1), timeout=3)
    # Each may have been called by the other, or have called it; at least one has.
    messages = [str(task.result()) for task in (first, second)]
    assert all("not know this job's secret" in message for message in messages), messages
    assert any("secret (KERAS_PSPLUS_JOB_TOKEN differs" in message for message in messages)
    lines = [*first.lines, *second.lines]
    assert any("KERAS_PSPLUS_JOB_TOKEN differs" in line for line in lines)


def test_silent_connections_delay_nobody():
    cluster = make_cluster(2)
    first = Waiting(TaskConfig(cluster, "worker", 0))
    host, port = cluster["worker"][0].split(":")
    _dial_until_up(cluster["worker"][0], TaskConfig(cluster, "worker", 1))
    with contextlib.ExitStack() as silent:
        # More than it holds, some of which begin like a hello.
        for number in range(200):
            stranger = silent.enter_context(socket.create_connection((host, int(port)), 2))
            stranger.sendall(b"keras-psplus"[: number % 13])
        second = Waiting(TaskConfig(cluster, "worker", 1))
        assert (first.result(), second.result()) == (None, None)
        check_local_address(TaskConfig(cluster, "worker", 0))


def test_silent_server_counts_as_up(quick):
    cluster = make_cluster(2)
    host, port = cluster["worker"][1].split(":")
    with socket.create_server((host, int(port))):  # accepts in the kernel, never speaks
        wait_for_cluster(TaskConfig(cluster, "worker", 0), timeout=10)


def test_ip_of_another_machine_is_an_error():
    cluster = {"worker": ("192.0.2.1:2222", "127.0.0.1:2223")}  # an address for documentation
    with pytest.raises(ClusterStartupError, match=r"192\.0\.2\.1:2222, is not on this machine"):
        wait_for_cluster(TaskConfig(cluster, "worker", 0), timeout=1)


def test_own_name_that_does_not_resolve_is_an_error():
    cluster = {"worker": ("no-such-host.invalid:2222", "127.0.0.1:2223")}
    with pytest.raises(ClusterStartupError, match=r"'no-such-host\.invalid'.*does not resolve"):
        wait_for_cluster(TaskConfig(cluster, "worker", 0), timeout=0.5)


def test_own_name_that_leads_elsewhere_is_a_warning(monkeypatch):
    real = socket.getaddrinfo

    def resolve(host, port, *args, **kwargs):
        return real("192.0.2.1" if host == "service" else host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    (port,) = free_ports(1)
    lines = []
    monkeypatch.setattr(handshake, "dial", _nobody)
    wait_for_cluster(
        TaskConfig({"worker": (f"service:{port}",)}, "worker", 0), timeout=5, log=lines.append
    )
    assert "another address" in lines[0]


def test_the_first_task_of_a_large_cluster_may_find_itself_elsewhere(monkeypatch):
    monkeypatch.setattr(preflight, "EVERYBODY", 0)
    # It may listen there, as is seen first.
    is_here = iter([True])
    monkeypatch.setattr(preflight, "is_local", lambda host: next(is_here, False))
    found = []
    # What a service in front of it passes on to it.
    monkeypatch.setattr(handshake, "dial", lambda address, mine, *_: found.append(mine) or mine)
    wait_for_cluster(TaskConfig(make_cluster(1), "worker", 0), timeout=5, all_wait=True)
    assert {identity.task for identity in found} == {"worker-0"}


def _nobody(*_):
    raise OSError("nobody")


def test_unresolvable_peer_is_reported():
    (port,) = free_ports(1)
    cluster = {"worker": (f"127.0.0.1:{port}", "no-such-host.invalid:1")}
    with pytest.raises(ClusterStartupError, match="worker-1 at .* does not resolve"):
        wait_for_cluster(TaskConfig(cluster, "worker", 0), timeout=0.5)


def test_probe_peers():
    cluster = make_cluster(3)
    host, port = cluster["worker"][1].split(":")
    with socket.create_server((host, int(port))):
        reasons = probe_peers(TaskConfig(cluster, "worker", 0), timeout=2)
    assert reasons["worker-1"] is None
    assert "connection refused" in reasons["worker-2"]
    assert set(reasons) == {"worker-1", "worker-2"}


def _call(address, identity, proof):
    """Calls with any text instead of an identity; returns what came back for it."""
    with ChannelClient(address, None) as client:
        opened = client.send(json.dumps({"open": "n"}), 5)
        call = {"caller": "n", "session": json.loads(opened)["session"], "number": 1}
        call |= {"body": identity, "proof": proof}
        return opened, client.send(json.dumps(call), 5)


def _dial_until_up(address, config):
    mine, deadline = PeerIdentity.of(config), time.monotonic() + 10
    while True:
        try:
            return conflict(mine, handshake.dial(address, mine, JobSecret.of(config)))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
