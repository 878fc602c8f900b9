"""The cluster that a `ClusterResolver` of TensorFlow describes, and what is wrong with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from keras_psplus.arguments import shown
from keras_psplus.cluster.config import EVALUATOR, ClusterConfigError, TaskConfig, split_address
from keras_psplus.cluster.discovery import find
from keras_psplus.tf_internals import slurm_cluster_resolver

if TYPE_CHECKING:
    import tensorflow as tf

_LEAVE_OUT = (
    "Leave out `cluster_resolver`: the strategy reads what Slurm, Kubernetes, MPI and torchrun say "
    "of a process by itself, or TF_CONFIG."
)


def task_of(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> TaskConfig | None:
    """Returns the task that a resolver says this process is.

    Returns:
        `TaskConfig`, or None if the resolver knows no cluster.
    """
    check(resolver)
    received = f"Received: cluster_resolver={type(resolver).__name__}"
    try:
        spec = resolver.cluster_spec().as_dict()
    except Exception as error:
        raise ClusterConfigError(
            f"The cluster resolver cannot tell the cluster: {type(error).__name__}: {error}. "
            f"{_what_is_wrong(resolver)}{_LEAVE_OUT} {received}"
        ) from error
    if not spec:
        return None
    job, index = resolver.task_type, resolver.task_id
    if job != EVALUATOR and (job not in spec or index not in range(len(spec[job]))):
        raise ClusterConfigError(
            "The cluster resolver does not say which task of its cluster this process is. Set its "
            "`task_type` and `task_id`; KubernetesClusterResolver has none by itself. "
            f"{_LEAVE_OUT} {received}, task_type={job!r}, task_id={index!r}, cluster={spec}"
        )
    task = TaskConfig({name: tuple(tasks) for name, tasks in spec.items()}, job, int(index or 0))
    node = os.environ.get("SLURMD_NODENAME")
    if node and _is_slurm(resolver) and task.address and split_address(task.address)[0] != node:
        raise ClusterConfigError(
            f"The cluster resolver says that {task.name} is at {task.address}, but it is on "
            f"{node}. {_what_is_wrong(resolver)}{_LEAVE_OUT} {received}, SLURMD_NODENAME={node}"
        )
    find.bypass(task)
    return task


def check(resolver: object) -> None:
    """Raises `ValueError` for what is no `ClusterResolver` of TensorFlow."""
    # Any class that has its methods will do.
    if not callable(getattr(resolver, "cluster_spec", None)) or isinstance(resolver, type):
        raise ValueError(
            "`cluster_resolver` must be a `tf.distribute.cluster_resolver.ClusterResolver`, or "
            f"None for the cluster in TF_CONFIG. Received: cluster_resolver={shown(resolver)}"
        )


def _is_slurm(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> bool:
    return isinstance(resolver, slurm_cluster_resolver.SlurmClusterResolver)


def _what_is_wrong(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> str:
    if not _is_slurm(resolver):
        return ""
    return (
        "SlurmClusterResolver fails on nodes without GPUs, and takes nodes in the order of their "
        "names as text, in which n10 comes before n2. "
    )
