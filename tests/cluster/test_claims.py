"""Who has a task that serves: the rules, without a network."""

import socket

import pytest

from keras_psplus.cluster import handshake, serving
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.serving import LeaseHolder, ServerLease
from tests.cluster import certificates


@pytest.fixture
def claims():
    (port,) = free_ports(1)
    return LeaseHolder(f"127.0.0.1:{port}")


def test_the_first_chief_has_it_and_the_second_is_told_who(claims):
    first = {"who": "chief-0 (process 1 on a)", "host": "a", "process": "x", "address": "a:1"}
    second = {"who": "chief-0 (process 2 on b)", "host": "b", "process": "y", "address": "b:1"}
    assert claims.claim(**first) is None
    assert claims.claim(**first) is None
    assert "process 1 on a" in claims.claim(**second)


def test_one_that_has_ended_makes_room(claims, monkeypatch):
    (port,) = free_ports(1)
    own = {"who": "first", "host": "a", "process": "x", "address": f"127.0.0.1:{port}"}
    other = {"who": "other", "host": "b", "process": "y", "address": None}
    assert claims.claim(**own) is None
    # It may be about to start its server.
    assert claims.claim(**other)
    monkeypatch.setattr(serving, "_START_SECONDS", 0)
    with socket.create_server(("127.0.0.1", port)):
        assert claims.claim(**other)
    assert claims.claim(**other) is None
    assert claims.claim(**own) is None


def test_one_that_is_started_again_takes_its_place(claims):
    own = {"who": "first", "host": "a", "process": "x", "address": "a:1"}
    assert claims.claim(**own) is None
    assert claims.claim(**{**own, "process": "y"}) is None
    assert claims.claim(**own | {"process": "z", "host": "b"})


@pytest.mark.parametrize("mine, theirs", [("this", "other"), ("this", ""), ("", "other")])
def test_another_token_is_refused(monkeypatch, caplog, tmp_path, mine, theirs):
    monkeypatch.setenv(TOKEN_VARIABLE, mine)
    (port,) = free_ports(1)
    task = TaskConfig({"chief": ("127.0.0.1:1",), "ps": (f"127.0.0.1:{port}",)}, "ps", 0)
    listener = serving.ShutdownListener()
    channel = serving.listen_to_chief(
        task, {"claim": LeaseHolder("127.0.0.1:1").claim, "word": listener.receive}
    )
    try:
        with pytest.raises(ClusterStartupError, match="control channel.*Received: TF_CONFIG"):
            serving.listen_to_chief(task, {})
        lease = ServerLease(task.cluster)
        monkeypatch.setenv(TOKEN_VARIABLE, theirs)
        message = r"ps-0 \(127.*ps-0 belongs to another job: its token differs"
        with pytest.raises(ClusterStartupError, match=message):
            lease.claim_all()
        serving.ShutdownNotifier({"ps-0": task.address})
        assert not listener.has_chief_started
        monkeypatch.setenv(TOKEN_VARIABLE, mine)
        lease.claim_all()
        monkeypatch.setattr(lease, "_own", {**lease._own, "process": "z", "who": "another"})
        with pytest.raises(ClusterStartupError, match="serves another chief: chief .process"):
            lease.claim("ps-0")
        serving.ShutdownNotifier({"ps-0": task.address})
        assert listener.is_chief_lost and not listener.has_chief_left
        # A chief and its servers have to agree on TLS.
        for name, value in certificates.make(tmp_path, "task").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ClusterStartupError, match="does not speak TLS.*Received"):
            lease.claim("ps-0")
    finally:
        channel.close()
    lease.claim("ps-0")  # as TensorFlow's own server
    assert not caplog.records

    def dropped(*_):
        raise TimeoutError("no answer")

    monkeypatch.setattr(handshake, "connect", dropped)
    lease.claim("ps-0")
    assert "ps-0 cannot be reached on its control channel, 127" in caplog.text
