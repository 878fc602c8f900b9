"""Clusters for tests of one's own models, in one process or in several.

- `logical_devices`: several replicas in one process, no network.
- `InProcessCluster`: workers and parameter servers as threads of one process.
- `run_in_processes`: a script in real processes, with a hard time limit.
"""

from typing import Self

import tensorflow as tf

from keras_psplus.cluster.environment import plan_tasks
from keras_psplus.cluster.testing import run_in_processes
from keras_psplus.tf_internals import context as _tf_context

__all__ = ["InProcessCluster", "logical_devices", "run_in_processes"]


class InProcessCluster:
    """Workers and parameter servers inside this process.

    For testing parameter-server training without starting processes: this
    process is the chief, and the servers are threads of it. TensorFlow cannot
    stop a server, so they stay until the process ends: make one cluster per
    process and share it between tests.

    Example:

    ```python
    with InProcessCluster(workers=2, ps=1) as cluster:
        strategy = tf.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ```

    Args:
        workers: Number of workers.
        ps: Number of parameter servers.
    """

    def __init__(self, workers: int = 2, ps: int = 1) -> None:
        self._tasks = plan_tasks(workers, ps)
        self._servers: list[tf.distribute.Server] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        pass  # there is nothing that could be stopped

    def start(self) -> None:
        """Starts the servers; does nothing the second time."""
        if self._servers:
            return
        spec = self._cluster_spec()
        for task in self._tasks:
            self._servers.append(
                tf.distribute.Server(
                    spec,
                    job_name=task.config.task_type,
                    task_index=task.config.task_index,
                    protocol="grpc",
                    config=self._server_config(),
                )
            )

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
        """A resolver for a chief in this process; the chief has no address."""
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            self._cluster_spec(), rpc_layer="grpc"
        )

    @property
    def targets(self) -> list[str]:
        """The servers' addresses in order (workers, ps), e.g. `"grpc://localhost:2222"`."""
        return [f"grpc://{task.config.address}" for task in self._tasks]

    def _cluster_spec(self) -> tf.train.ClusterSpec:
        cluster = self._tasks[0].config.cluster
        return tf.train.ClusterSpec({job: list(tasks) for job, tasks in cluster.items()})

    def _server_config(self) -> tf.compat.v1.ConfigProto:
        # With fewer threads than servers, servers that wait for each other occupy all of them.
        config = tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=len(self._tasks) + 1, intra_op_parallelism_threads=1
        )
        config.device_count["GPU"] = 0  # the devices are the chief's
        config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
        return config


def logical_devices(n: int) -> list[str]:
    """Splits this process's CPU into `n` devices, so that it can have `n` replicas.

    Example:

    ```python
    strategy = tf.distribute.MirroredStrategy(logical_devices(2))
    ```

    Args:
        n: Number of devices.

    Returns:
        The devices' names, `["CPU:0", "CPU:1", ...]`.

    Raises:
        RuntimeError: If TensorFlow's runtime has been started with another
            number of devices; they are fixed then.
    """
    names = [f"CPU:{index}" for index in range(n)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    if _tf_context.context()._context_handle is None:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in names]
        )
        return names
    present = len(tf.config.list_logical_devices("CPU"))
    if present != n:
        raise RuntimeError(
            "The CPU has to be split before TensorFlow runs its first operation: call "
            f"`logical_devices` at the start of the program (in pytest: in conftest.py). It has "
            f"{present} logical device(s) now. Received: n={n}"
        )
    return names
