"""Synchronous training: variables mirrored on the workers, gradients all-reduced."""

from keras_psplus.all_reduce.engine import AllReduceEngine
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy
from keras_psplus.core.jobs.failure import PeerLostError

__all__ = ["AllReduceEngine", "MultiWorkerMirroredStrategy", "PeerLostError"]
