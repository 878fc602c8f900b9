"""Role of a task at start-up: serve, or run the rest of the script."""

import os
from collections.abc import Mapping, Sequence

from keras_psplus.cluster import config, roles
from keras_psplus.cluster.discovery import discovery
from keras_psplus.cluster.serving import serve


def read_task() -> config.TaskConfig:
    """Reads `TF_CONFIG`; raises `ClusterConfigError` if it is not a cluster of this kind."""
    task = discovery.find_task_config()
    if task is None:
        raise config.ClusterConfigError(
            "ParameterServerStrategy needs a cluster with a chief, workers and ps tasks: set "
            "TF_CONFIG, or start the script by `keras-psplus run --workers 2 --ps 1`. "
            f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')!r}"
        )
    roles.refuse_evaluator("ParameterServerStrategy", task)
    for job in ("chief", "worker", "ps"):
        if job not in task.cluster:
            raise config.ClusterConfigError(
                f"ParameterServerStrategy needs at least one `{job}` task. "
                f"Received: {task.describe()}"
            )
    return task


def end_calls_of_lost_tasks() -> None:
    """Has TensorFlow's calls fail when the other task is gone, unless the environment says else.

    By default the chief sends eager operations in one stream for each worker. A new stream waits
    for its worker, so that an operation begun between a worker's loss and its notice would never
    end. A call for each operation fails at once, as `GRPC_FAIL_FAST=use_caller` asks for all
    others, and takes less time than the stream on fast networks.
    """
    os.environ.setdefault("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "false")


def addresses_of_servers(spec: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Addresses of the tasks that serve, by their names."""
    return {
        f"{job}-{i}": address for job in ("ps", "worker") for i, address in enumerate(spec[job])
    }


def serve_and_exit(task: config.TaskConfig, startup_timeout: float) -> None:
    """Serves until the chief has ended, and ends the process."""
    serve.end_process_after(lambda: serve.serve(task, startup_timeout=startup_timeout))
