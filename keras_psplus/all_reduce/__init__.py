"""Synchronous training: variables mirrored on the workers, gradients all-reduced."""

from keras_psplus.all_reduce.failure import PeerLostError
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy

__all__ = ["MultiWorkerMirroredStrategy", "PeerLostError"]
