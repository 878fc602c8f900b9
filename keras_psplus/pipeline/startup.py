"""Role of a pipeline's task at start-up: serve a stage, or run the script."""

from typing import NoReturn

import tensorflow as tf

from keras_psplus.cluster import config
from keras_psplus.cluster.discovery import find
from keras_psplus.cluster.serving import serve
from keras_psplus.core import plan


def read_task() -> config.TaskConfig | None:
    """Reads `TF_CONFIG`; None if there is none.

    Raises:
        ClusterConfigError: If it is not a cluster of a chief and workers.
    """
    task = find.find_task_config()
    if task is None:
        return None
    find.refuse_evaluator("PipelineStrategy", task)
    for job in ("chief", "worker"):
        if job not in task.cluster:
            raise config.ClusterConfigError(
                f"PipelineStrategy needs at least one `{job}` task: a chief that runs the script, "
                "and one worker for each stage, as `keras-psplus run --chief --workers 2` starts "
                f"them. Received: {task.describe()}"
            )
    if "ps" in task.cluster:
        raise config.ClusterConfigError(
            "PipelineStrategy has no parameter servers: each stage's variables are on its worker. "
            f"Leave `ps` out of TF_CONFIG (`--ps 0`). Received: {task.describe()}"
        )
    return task


def serve_and_exit(task: config.TaskConfig, startup_timeout: float) -> NoReturn:
    """Serves until the chief has ended, and ends the process."""
    serve.end_process_after(lambda: serve.serve(task, startup_timeout=startup_timeout))


def local_devices() -> list[str]:
    """Names of this process's devices that are stages: its GPUs, else its logical CPU devices.

    For a plan without training, its CPU as often as there are to be stages.
    """
    request = plan.read()
    if request is not None and request.stages is not None:
        return ["/job:localhost/replica:0/task:0/device:CPU:0"] * request.stages
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    job = "/job:localhost/replica:0/task:0"
    return [
        f"{job}/device:{tf.DeviceSpec.from_string(device.name).device_type}:{i}"
        for i, device in enumerate(devices)
    ]


def device_of_worker(index: int, kind: str) -> str:
    """Name of a worker's first device of a kind."""
    return f"/job:worker/replica:0/task:{index}/device:{kind}:0"


def devices_of_workers(count: int) -> list[str]:
    """Names of the stages' devices: each worker's first GPU, or its CPU."""
    names = {device.name for device in tf.config.list_logical_devices()}
    gpus = [device_of_worker(i, "GPU") for i in range(count)]
    return [gpu if gpu in names else device_of_worker(i, "CPU") for i, gpu in enumerate(gpus)]
