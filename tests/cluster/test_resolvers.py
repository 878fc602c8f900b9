"""What a `ClusterResolver` of TensorFlow says, and what is wrong with it."""

import pytest
import tensorflow as tf

from keras_psplus.all_reduce import startup
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.discovery import resolvers
from keras_psplus.tf_internals import slurm_cluster_resolver
from tests.support.tables import for_each

SPEC = tf.train.ClusterSpec({"worker": ["a:1", "b:1"]})
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n2,n10",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURMD_NODENAME": "n10",
    "CUDA_VISIBLE_DEVICES": "",  # The resolver sets it.
}


def simple(**task):
    return tf.distribute.cluster_resolver.SimpleClusterResolver(SPEC, **task)


@pytest.fixture
def slurm(monkeypatch):
    """Makes TensorFlow's resolver in the second task of two nodes."""

    def make(gpus, **variables):
        for name, value in {**SLURM, **variables}.items():
            monkeypatch.setenv(name, value)
        return slurm_cluster_resolver.SlurmClusterResolver(gpus_per_node=gpus)

    return make


def test_a_task_of_its_cluster():
    task = resolvers.task_of(simple(task_type="worker", task_id=1))
    assert (task.name, task.address) == ("worker-1", "b:1")
    assert startup.task_of(simple(task_type="evaluator", task_id=0)) is None
    nothing = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    assert resolvers.task_of(nothing) is None


def test_slurms_resolver(slurm):
    nodes = {"SLURM_STEP_NODELIST": "n1,n2", "SLURMD_NODENAME": "n2"}
    task = resolvers.task_of(slurm(1, **nodes))
    assert (task.name, task.address) == ("worker-1", "n2:8888")


@for_each(
    "task", [{}, {"task_type": "worker"}, {"task_type": "worker", "task_id": 2}, {"task_type": "x"}]
)
def test_a_resolver_that_names_no_task(task):
    with pytest.raises(ClusterConfigError, match="Set its `task_type` and `task_id`.* Received: "):
        resolvers.task_of(simple(**task))


@for_each(
    "gpus, message",
    [
        (0, "cannot tell the cluster: ValueError: .*fails on nodes without GPUs"),
        (1, "worker-1 is at n2:8888, but it is on n10.*n10 comes before n2"),
    ],
)
def test_what_slurms_resolver_does_wrong(slurm, gpus, message):
    with pytest.raises(ClusterConfigError, match=f"{message}.*Leave out `cluster_resolver`.*Slurm"):
        resolvers.task_of(slurm(gpus))
