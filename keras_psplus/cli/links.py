"""`keras-psplus doctor --links`: the links between workers, as `topology="auto"` measures them."""

import dataclasses
import json
import os
import sys

from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.discovery.discovery import find_task_config


def show(as_json: bool = False) -> int:
    """Measures the links between TF_CONFIG's workers; the chief prints a table.

    Each worker runs this.

    Args:
        as_json: Whether the chief prints JSON instead, and the others nothing.

    Returns:
        0, or 1 if there is no such cluster.
    """
    try:
        task = find_task_config()
    except ClusterConfigError as error:
        return _complain(error)
    if task is None or task.num_workers < 2:
        return _complain(
            "--links needs a cluster of at least two workers, and has to be started in each of "
            "them with its TF_CONFIG, as the training would be. "
            f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')}"
        )
    if task.task_type not in ("chief", "worker"):
        return _complain(f"--links measures workers. Received: {task.name}")
    # Servers take no part.
    workers = {job: addresses for job, addresses in task.cluster.items() if job != "ps"}
    os.environ["TF_CONFIG"] = dataclasses.replace(task, cluster=workers).to_tf_config()
    import keras_psplus
    from keras_psplus.all_reduce.topology import auto_topology, links

    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    decision = auto_topology.decide(strategy.extended)
    if not strategy.is_chief:
        print(f"{task.name} has measured its links; the chief shows them.", file=sys.stderr)
    elif as_json:
        found = links.as_file(decision.links, strategy.extended.control.names)
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(decision.report)
    return 0


def _complain(problem: object) -> int:
    print(f"keras-psplus doctor: {problem}", file=sys.stderr)
    return 1
