"""Who holds the others up, and by what, from the seconds of steps."""

import dataclasses
import json
import socket
import threading

import pytest

from keras_psplus.cluster.monitor.step_times import (
    PeerConnections,
    StepTimes,
    apart,
    slowest,
    unpacked,
)
from tests.support.tables import for_each

ALIKE = StepTimes(steps=10, seconds=0.3, data=0.05, link=0.05)


def workers(*changes):
    return {f"worker-{i}": dataclasses.replace(ALIKE, **each) for i, each in enumerate(changes)}


@for_each(
    "change, cause",
    [
        ({"seconds": 0.5}, "compute"),
        ({"seconds": 0.5, "data": 0.25}, "data"),
        ({"reads": 0.5}, "data"),
        ({"seconds": 0.5, "link": 0.25}, "link"),
        ({"host": 0.2}, "callbacks"),
    ],
)
def test_the_cause(change, cause):
    found = slowest(workers({}, change, {}))
    assert (found.task, found.cause) == ("worker-1", cause)
    assert found.factor == pytest.approx(1 + 0.2 / 0.3)
    assert slowest(workers({}, change))[:2] == ("worker-1", cause)
    assert str(found).startswith("worker-1, 1.7 times the median worker's step, by ")


@for_each("change", [{}, {"seconds": 0.38}, {"wait": 0.2}, {"steps": 0}])
def test_workers_that_are_alike(change):
    assert slowest(workers({}, {}, change)) is None
    assert slowest({}) is None


def test_the_last_to_arrive_at_a_collective_waits_for_nobody():
    early = StepTimes(steps=10, seconds=0.5, meets=0.4)
    late = StepTimes(steps=10, seconds=0.5, data=0.3, meets=0.1)
    means = apart({"worker-0": early, "worker-1": late})
    assert means["worker-0"].wait == pytest.approx(0.03)
    assert means["worker-0"].link == means["worker-1"].link == pytest.approx(0.01)
    assert means["worker-0"].cause("compute") == pytest.approx(0.01)
    found = slowest({"worker-0": early, "worker-1": late})
    assert (found.task, found.cause) == ("worker-1", "data")


def test_a_slow_link_in_a_ring():
    # 0 -> 1 -> 2 -> 0, and short messages the other way; packets of worker-1 come late.
    sending = [{"worker-1": (9e6, 0.3)}, {"worker-2": (9e6, 0.3)}, {"worker-0": (9e6, 0.02)}]
    times = {
        f"worker-{i}": StepTimes(steps=10, seconds=0.4, meets=0.35, peers=peers)
        for i, peers in enumerate(sending)
    }
    found = slowest(times)
    assert (found.task, found.cause) == ("worker-1", "link")
    assert slowest({n: unpacked(json.loads(json.dumps(t.packed()))) for n, t in times.items()})
    assert slowest({n: dataclasses.replace(t, peers={}) for n, t in times.items()}) is None


def test_a_slow_server():
    one = dataclasses.replace(ALIKE, link=0.2, servers={"ps-0": 0.02, "ps-1": 0.15})
    found = slowest({"worker-0": one, "worker-1": one})
    assert (found.task, found.cause) == ("ps-1", "server")
    one = dataclasses.replace(one, servers={"ps-0": 0.1, "ps-1": 0.1})
    assert slowest({"worker-0": one, "worker-1": one}) is None


def test_a_stage_with_too_many_layers():
    times = {
        f"worker-{i}": StepTimes(steps=10, seconds=3.0, wait=3.0 - work, part=f"stage {i}")
        for i, work in enumerate((1.0, 2.5, 1.0))
    }
    times["chief-0"] = StepTimes(steps=10, data=0.01, wait=3.0)
    found = slowest({n: unpacked(json.loads(json.dumps(t.packed()))) for n, t in times.items()})
    assert (found.task, found.cause, found.part) == ("worker-1", "compute", "stage 1")
    assert str(found).startswith("worker-1 (stage 1), 2.5 times the median worker's step, by comp")
    assert str(found).endswith(
        'give it fewer layers; stages="auto" cuts the model by measured times'
    )
    assert found.to_json()["part"] == times["worker-1"].to_json()["part"] == "stage 1"


def test_a_chief_that_reads_slowly():
    both = workers({}, {})
    # 20 steps of both workers took 1 s, of which each has worked 0.3 s.
    chief = StepTimes(steps=20, data=0.9, wait=0.1)
    found = slowest({**both, "chief-0": chief})
    assert (found.task, found.cause) == ("chief-0", "data")
    callbacks = StepTimes(steps=20, host=0.9, wait=0.1)
    assert slowest({**both, "chief-0": callbacks})[:2] == ("chief-0", "callbacks")
    # It reads while they work, and waits for them.
    assert slowest({**both, "chief-0": StepTimes(steps=20, data=0.1, wait=0.2)}) is None


def test_times_of_an_interval():
    before = StepTimes(steps=2, seconds=1.0, servers={"ps-0": 0.5}, peers={"worker-1": (8.0, 0.5)})
    now = before.plus(StepTimes(steps=4, seconds=2.0, servers={"ps-1": 0.1}))
    since = now.since(before)
    assert (since.steps, since.per_step().seconds) == (4, 0.5)
    assert since.servers == {"ps-0": 0.0, "ps-1": 0.1} and since.peers == {"worker-1": (0.0, 0.0)}
    assert since.per_step().to_json()["compute_ms"] == 500.0


def test_bytes_by_peer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = PeerConnections({"worker-1": f"127.0.0.1:{server.getsockname()[1]}"})
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            peers.totals()
            reader = threading.Thread(target=lambda: other.recv(1 << 16, socket.MSG_WAITALL))
            reader.start()
            one.sendall(bytes(1 << 16))
            reader.join()
            sent, seconds = peers.totals()["worker-1"]
            assert sent >= 1 << 16 and seconds >= 0
    # Closed connections count as well; peers of one host cannot be told apart.
    assert peers.totals()["worker-1"][0] == sent
    assert PeerConnections({"worker-1": "127.0.0.1:1", "worker-2": "127.0.0.1:2"}).totals() == {}
