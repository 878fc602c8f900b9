"""TensorFlow's own strategies in a task of a cluster: Keras 3 does not train there."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.cluster.config import read_task_config
from keras_psplus.errors import ClusterConfigError

_OURS = {
    "MultiWorkerMirroredStrategy": "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy": "ParameterServerStrategy",
    "MirroredStrategy": "MultiWorkerMirroredStrategy",
}


def install() -> None:
    """Has these classes refuse to be made in a cluster of several tasks.

    Subclasses, and Keras 2 (`tf_keras`), are left alone.
    """
    for name, ours in _OURS.items():
        stock: Any = getattr(tf.distribute, name)
        stock.__init__ = _refusing(stock.__init__, name, ours)


def _refusing(make: Callable[..., None], name: str, ours: str) -> Callable[..., None]:
    @functools.wraps(make)
    def init(self: object, *args: Any, **options: Any) -> None:
        if type(self).__module__.startswith("tensorflow.") and "tf_keras" not in sys.modules:
            _refuse(name, ours)
        make(self, *args, **options)

    return init


def _refuse(name: str, ours: str) -> None:
    try:
        task = read_task_config()
    except ClusterConfigError:
        return  # Who needs the cluster says it.
    if task is None or len(list(task.tasks())) < 2:
        return
    raise RuntimeError(
        f"tf.distribute.{name} is TensorFlow's own strategy, under which Keras 3 does not train in "
        f"several processes. Write `strategy = keras_psplus.{ours}()`, or "
        "`strategy = keras_psplus.strategy_from_env()` and choose it by --strategy. "
        f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')}"
    )
