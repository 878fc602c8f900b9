"""Who has a task that serves: the rules, without a network."""

import json
import socket

import pytest

from keras_psplus.cluster.channel.sessions import RefusedError, Session
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.secret import Secret
from keras_psplus.cluster.serving import claims as claims_module
from keras_psplus.cluster.serving.claims import LeaseHolder


@pytest.fixture
def claims():
    (port,) = free_ports(1)
    return LeaseHolder("ps-0", f"127.0.0.1:{port}")


def ask(claims, secret, **own):
    session = Session(secret, lambda text: claims._hear(text.encode()).decode())
    return json.loads(session.ask(json.dumps(own)))["held"]


def test_the_first_chief_has_it_and_the_second_is_told_who(claims):
    first = {"who": "chief-0 (process 1 on a)", "host": "a", "process": "x", "address": "a:1"}
    second = {"who": "chief-0 (process 2 on b)", "host": "b", "process": "y", "address": "b:1"}
    assert ask(claims, Secret(""), **first) is None
    assert ask(claims, Secret(""), **first) is None
    assert "process 1 on a" in ask(claims, Secret(""), **second)


def test_one_that_has_ended_makes_room(claims, monkeypatch):
    (port,) = free_ports(1)
    own = {"who": "first", "host": "a", "process": "x", "address": f"127.0.0.1:{port}"}
    other = {"who": "other", "host": "b", "process": "y", "address": None}
    assert claims.claim(**own) is None
    # It may be about to start its server.
    assert claims.claim(**other)
    monkeypatch.setattr(claims_module, "_START_SECONDS", 0)
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
def test_another_token_is_refused(monkeypatch, mine, theirs):
    monkeypatch.setenv(claims_module.TOKEN_VARIABLE, mine)
    claims = LeaseHolder("ps-0", "127.0.0.1:1")
    own = {"who": "first", "host": "a", "process": "x", "address": "a:1"}
    with pytest.raises(RefusedError, match="ps-0 belongs to another job: its token differs"):
        ask(claims, Secret(theirs), **own)
    assert ask(claims, Secret(mine), **own) is None
