"""What is read from, and set in, the graph of a `tf.data.Dataset`."""
