"""What a task of the cluster is to do: serve, or run the rest of the script."""

import os
import sys

from keras_psplus.cluster import config, serve


def read_task():
    """Reads `TF_CONFIG`; raises `ClusterConfigError` if it is not a cluster of this kind."""
    task = config.read_task_config()
    if task is None:
        raise config.ClusterConfigError(
            "ParameterServerStrategy needs a cluster with a chief, workers and ps tasks: set "
            "TF_CONFIG, or start the script by `keras-psplus run --workers 2 --ps 1`. "
            f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')!r}"
        )
    for job in ("chief", "worker", "ps"):
        if job not in task.cluster:
            raise config.ClusterConfigError(
                f"ParameterServerStrategy needs at least one `{job}` task. "
                f"Received: {task.describe()}"
            )
    return task


def serve_and_exit(task, startup_timeout):
    """Serves until the chief has ended, and ends the process."""
    code = 0
    try:
        serve.serve(task, startup_timeout=startup_timeout)
    except serve.ChiefLostError as error:
        print(f"keras_psplus: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # TensorFlow's server cannot be stopped in any other way.
    os._exit(code)
