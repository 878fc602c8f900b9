"""A worker that joins a running job has its chief's versions, or is refused."""

import pytest

from keras_psplus.cluster.serving import control, serve
from keras_psplus.errors import ClusterStartupError
from keras_psplus.parameter_server.startup import Servers


class Lease:
    """Claims of the chief of a job."""

    servers = {"worker-1": "10.0.0.2:2222"}

    def __init__(self):
        self.claimed = []

    def claim(self, name):
        self.claimed.append(name)


def servers_with(monkeypatch, answer):
    def ask(address, what, payload):
        assert (address, what) == ("10.0.0.2:2222", "versions")
        return answer

    monkeypatch.setattr(control, "ask", ask)
    servers = object.__new__(Servers)
    servers._lease = Lease()
    return servers


def test_a_worker_of_the_same_versions_is_admitted(monkeypatch):
    servers = servers_with(monkeypatch, serve.own_versions())
    servers.admit("worker-1")
    assert servers._lease.claimed == ["worker-1"]


def test_a_worker_of_other_versions_is_refused(monkeypatch):
    others = {name: "0.0.1" for name in serve.own_versions()}
    servers = servers_with(monkeypatch, others)
    words = r"worker-1 \(10.0.0.2:2222\) has other versions.*Received: .*0\.0\.1"
    with pytest.raises(ClusterStartupError, match=words):
        servers.admit("worker-1")
