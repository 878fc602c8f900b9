"""Callbacks for `fit` beside Keras's own."""

from keras_psplus.callbacks.communication_monitor import CommunicationMonitor

__all__ = ["CommunicationMonitor"]
