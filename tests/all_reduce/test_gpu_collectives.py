"""Collectives between GPUs, as far as they can be seen without one."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils

from keras_psplus.all_reduce.collectives import implementation
from keras_psplus.all_reduce.collectives.operations import Launcher
from tests.support.tables import for_each

OPTIONS = tf.distribute.experimental.CommunicationOptions
KINDS = tf.distribute.experimental.CommunicationImplementation


@for_each("shape", [(7, 11, 13), (2,), ()])
@for_each("replicas", [2, 3])
def test_bfloat16_is_summed_share_by_share(shape, replicas):
    parts = [
        tf.cast(tf.random.stateless_normal(shape, [1, i]), tf.bfloat16) for i in range(replicas)
    ]
    sent = [implementation.to_shares(part, replicas) for part in parts]
    assert {words.dtype for words in sent} == {tf.float32}
    received = [tf.stack([words[i] for words in sent]) for i in range(replicas)]
    gathered = tf.concat([implementation.sum_of_shares(words) for words in received], 0)
    total = implementation.from_shares(gathered, parts[0].shape)
    exact = sum(tf.cast(part, tf.float32) for part in parts)
    np.testing.assert_array_equal(tf.cast(total, tf.float32), _rounded(exact))
    assert total.shape == shape


def test_gpus_sum_only_what_tensorflow_can(monkeypatch):
    monkeypatch.setattr(Launcher, "_on_cpu", False)
    launcher = Launcher(1, 2, cross_device_utils.CollectiveKeys(), "/device:CPU:0", OPTIONS())

    @tf.function(autograph=False)
    def step(halves, words):
        return launcher.all_reduce(halves), launcher.all_reduce(words)

    graph = step.get_concrete_function(
        tf.TensorSpec([3, 5], tf.bfloat16), tf.TensorSpec([9], tf.int32)
    )
    kinds = {
        (op.type, op.get_attr("T"))
        for op in graph.graph.get_operations()
        if op.type.startswith("Collective")
    }
    assert kinds == {
        ("CollectiveReduceV2", tf.int64),
        ("CollectiveAllToAllV2", tf.float32),
        ("CollectiveGatherV2", tf.float32),
    }
    assert [tuple(t.shape) for t in graph.outputs] == [(3, 5), (9,)]


def _rounded(values):
    return tf.cast(tf.cast(values, tf.bfloat16), tf.float32)


class Peers:
    """A control plane whose other worker says what it is given."""

    class task:
        name = "worker-0"

    names = ["worker-0", "worker-1"]

    def __init__(self, theirs):
        self.theirs, self.checked = theirs, []

    def check_same(self, kind, fingerprint, description):
        self.checked.append((kind, fingerprint))

    def exchange(self, kind, text):
        return [text, self.theirs]


@pytest.fixture
def one_gpu(monkeypatch):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(implementation.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(implementation.ctypes.util, "find_library", lambda name: "libnccl.so.2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")


@pytest.mark.parametrize(
    ("theirs", "expected", "said"),
    [
        ("GPU 3 of there", "NCCL", "gradients travel between 2 GPUs by NCCL"),
        ("GPU 2 of here", "NCCL", "by NCCL"),
        ("GPU 3 of here", "RING", "by TensorFlow's ring, as 2 replicas share GPU 3 of here"),
    ],
)
def test_nccl_is_used_where_each_replica_has_a_gpu(theirs, expected, said, one_gpu, caplog):
    caplog.set_level("INFO", "keras_psplus")
    peers = Peers(f'["{theirs}"]')
    chosen = implementation.choose(OPTIONS(timeout_seconds=7), ["/device:GPU:0"], peers)
    assert (chosen.implementation, chosen.timeout_seconds) == (KINDS[expected], 7)
    assert said in caplog.text
    assert peers.checked == [("devices", "1 x GPU")]


def test_the_ring_is_used_without_the_library(one_gpu, monkeypatch, caplog):
    caplog.set_level("INFO", "keras_psplus")
    monkeypatch.setattr(implementation.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(implementation, "_is_installed", lambda package: False)
    peers = Peers('["GPU 3 of there"]')
    chosen = implementation.choose(OPTIONS(), ["/device:GPU:0"], peers)
    assert chosen.implementation == KINDS.RING
    assert "pip install nvidia-nccl-cu12" in caplog.text


def test_logical_gpus_use_the_ring(one_gpu, caplog):
    devices = ["/device:GPU:0", "/device:GPU:1"]
    assert implementation.choose(OPTIONS(), devices, None).implementation == KINDS.RING


def test_what_the_user_chooses_stays(one_gpu):
    given = OPTIONS(implementation=KINDS.NCCL)
    assert implementation.choose(given, ["/device:GPU:0"], Peers('["GPU 3 of here"]')) is given
    cpus = OPTIONS()
    assert implementation.choose(cpus, ["/device:CPU:0"], None) is cpus
