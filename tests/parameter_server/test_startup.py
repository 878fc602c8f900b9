"""Workers that join have their chief's versions and as many GPUs as others, or are refused."""

import pytest

from keras_psplus.cluster import serving
from keras_psplus.cluster.channel import RefusedError
from keras_psplus.errors import ClusterStartupError
from keras_psplus.parameter_server.extended import gpus_per_worker
from keras_psplus.parameter_server.strategy import Servers
from tests.support.tables import for_each


class Lease:
    """Claims of the chief of a job."""

    servers = {"worker-1": "10.0.0.2:2222"}

    def __init__(self, knows_claims):
        self.claimed, self.knows_claims = [], knows_claims

    def claim(self, name):
        self.claimed.append(name)
        return self.knows_claims


def servers_with(monkeypatch, answer, knows_claims=True):
    def ask(address, what, payload):
        assert (address, what) == ("10.0.0.2:2222", "versions")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(serving, "ask", ask)
    servers = object.__new__(Servers)
    servers._lease = Lease(knows_claims)
    return servers


def test_a_worker_of_the_same_versions_is_admitted(monkeypatch):
    servers = servers_with(monkeypatch, serving.own_versions())
    servers.admit("worker-1")
    assert servers._lease.claimed == ["worker-1"]


def test_a_worker_of_other_versions_is_refused(monkeypatch):
    others = {name: "0.0.1" for name in serving.own_versions()}
    servers = servers_with(monkeypatch, others)
    words = r"worker-1 \(10.0.0.2:2222\) has other versions.*Received: .*0\.0\.1"
    with pytest.raises(ClusterStartupError, match=words):
        servers.admit("worker-1")


@pytest.mark.parametrize(
    "error",
    [
        # One of a version that does not know the question, or that is gone again.
        ConnectionError("KeyError: 'versions'"),
        # Another one at its address, since it was claimed.
        RefusedError("its token differs"),
        TimeoutError("timed out"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(("knows_claims", "is_expected"), [(True, True), (False, False)])
def test_a_worker_that_does_not_say_its_versions_is_refused(
    error, knows_claims, is_expected, monkeypatch
):
    servers = servers_with(monkeypatch, error, knows_claims)
    answer = str(error) if knows_claims else "no answer"
    words = rf"worker-1 \(10.0.0.2:2222\) cannot be asked.*10.0.0.2:3222.*Received: {answer}$"
    with pytest.raises(ClusterStartupError, match=words):
        servers.admit("worker-1", is_expected)


def test_a_server_of_tensorflow_s_own_comes_back_to_a_fixed_number(monkeypatch):
    servers_with(monkeypatch, ConnectionError("refused"), False).admit("worker-1")


def gpus(*counts):
    return [
        f"/job:worker/replica:0/task:{task}/device:GPU:{i}"
        for task, count in enumerate(counts)
        for i in range(count)
    ]


def test_one_gpu_or_none_on_each_worker():
    assert gpus_per_worker([], range(3)) == 0
    assert gpus_per_worker(gpus(1, 1), range(2)) == 1
    # The others' are of no concern.
    assert gpus_per_worker(["/job:chief/replica:0/task:0/device:GPU:0", *gpus(1, 1)], range(2)) == 1
    assert gpus_per_worker(["/job:ps/replica:0/task:0/device:GPU:0"], range(2)) == 0


@for_each("counts", [(1, 0), (0, 1), (2, 2), (1, 2)])
def test_unequal_or_several_gpus_are_refused(counts):
    told = f"Received: GPUs of worker-0: {counts[0]}, worker-1: {counts[1]}"
    with pytest.raises(ValueError, match=told):
        gpus_per_worker(gpus(*counts), range(2))
