"""Synchronous training: variables mirrored on the workers, gradients all-reduced."""

# For strategies of one's own; its methods are those of `keras_psplus.engine.Engine`.
from keras_psplus.all_reduce.engine import AllReduceEngine as AllReduceEngine
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy
from keras_psplus.errors import PeerLostError

__all__ = ["MultiWorkerMirroredStrategy", "PeerLostError"]
