"""The cluster around a training process: its description, start and end.

Nothing here knows of strategies, and importing this package does not import
TensorFlow: the launcher uses it too, and has to start quickly.
"""

from keras_psplus.cluster.config import (
    ClusterConfigError,
    ClusterStartupError,
    TaskConfig,
    read_task_config,
)
from keras_psplus.cluster.discovery.find import find_task_config
from keras_psplus.cluster.preflight import wait_for_cluster

__all__ = [
    "ClusterConfigError",
    "ClusterStartupError",
    "TaskConfig",
    "find_task_config",
    "read_task_config",
    "wait_for_cluster",
]
