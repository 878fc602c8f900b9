"""Update rules: how often workers communicate.

Strategies take one as `updates=`.
"""

from keras_psplus.updates.accumulate import Accumulate
from keras_psplus.updates.base import Context, ReplicaUpdates, Step, Updates, map_values
from keras_psplus.updates.diloco import DiLoCo
from keras_psplus.updates.local_sgd import LocalSGD
from keras_psplus.updates.specs import get

__all__ = [
    "Accumulate",
    "Context",
    "DiLoCo",
    "LocalSGD",
    "ReplicaUpdates",
    "Step",
    "Updates",
    "get",
    "map_values",
]
