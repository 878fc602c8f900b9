"""From `TF_CONFIG` to a TensorFlow runtime that all workers have joined."""

import os

import tensorflow as tf

from keras_psplus.all_reduce import liveness
from keras_psplus.arguments import shown
from keras_psplus.cluster import config, environment, preflight
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.discovery import find, resolvers
from keras_psplus.cluster.process import early_init, tuning
from keras_psplus.tf_internals import context, coordination_config_pb2, multi_worker_util

_JOBS = ("chief", "worker")


def start(
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
    startup_timeout: float,
    heartbeat_timeout: float,
    allow_ps: bool = False,
) -> config.TaskConfig | None:
    """Checks the cluster, waits for its workers, and configures TensorFlow for it.

    Returns:
        `TaskConfig` of this process, or None if it trains alone.
    """
    task = _found(cluster_resolver)
    if task is None:
        return None
    if task.task_type == config.EVALUATOR:
        if environment.VISIBLE not in os.environ:
            tuning.hide_gpus()
        return None
    if task.num_ps and not allow_ps:
        raise config.ClusterConfigError(
            "MultiWorkerMirroredStrategy keeps variables on the workers and has no use for `ps` "
            "tasks. Take them out of the cluster. "
            f"Received: {task.describe()}"
        )
    if task.num_workers == 1:
        return task
    early_init.check_not_initialized("a strategy for several workers")
    tuning.tune()
    preflight.wait_for_cluster(task, job_types=_JOBS, timeout=startup_timeout, all_wait=True)
    early_init.disarm()
    spec = _spec_of(task)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(spec),
        cluster_register_timeout_in_ms=int(startup_timeout * 1000),
        heartbeat_timeout_in_ms=int(liveness.service_seconds(heartbeat_timeout) * 1000),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
            for job in spec.jobs
        ],
    )
    return task


def task_of(
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
) -> config.TaskConfig | None:
    """`TaskConfig` of this process, or None if it trains alone."""
    task = _found(cluster_resolver)
    return None if task is None or task.task_type == config.EVALUATOR else task


def _found(
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
) -> TaskConfig | None:
    if cluster_resolver is not None:
        return resolvers.task_of(cluster_resolver)
    return find.find_task_config()


def check_communication_options(given: object) -> None:
    """Raises `ValueError` for what are no options of TensorFlow."""
    kind = tf.distribute.experimental.CommunicationOptions
    # Its constructor returns another class than it is the name of.
    if given is not None and not isinstance(given, (kind, type(kind()))):
        raise ValueError(
            "`communication_options` must be a `tf.distribute.experimental.CommunicationOptions`, "
            f"or None. Received: communication_options={shown(given)}"
        )


def workers_of(task: config.TaskConfig | None) -> list[str] | None:
    """Names of the tasks that train, in rank order; None without a cluster."""
    if task is None:
        return None
    return [config.task_name(job, index) for job, index, _ in task.tasks() if job in _JOBS]


def resolver_for(
    task: config.TaskConfig | None,
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """The resolver to hand to TensorFlow; an empty one if the process trains alone."""
    if task is None or task.num_workers == 1:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    if task.num_ps:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            _spec_of(task), task_type=task.task_type, task_id=task.task_index, rpc_layer="grpc"
        )
    return cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()


def _spec_of(task: TaskConfig) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec(
        {job: list(task.cluster[job]) for job in _JOBS if job in task.cluster}
    )
