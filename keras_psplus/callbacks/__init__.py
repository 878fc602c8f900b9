"""Callbacks for `fit` beside Keras's own."""

from keras_psplus.callbacks.communication_monitor import CommunicationMonitor
from keras_psplus.callbacks.publish_tables import PublishTables

__all__ = ["CommunicationMonitor", "PublishTables"]
