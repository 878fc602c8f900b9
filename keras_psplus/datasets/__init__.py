"""Inspection and changes of the graph of a `tf.data.Dataset`."""
