"""Which rows of a table lie on a server, and their first value."""

import keras
import tensorflow as tf

# Larger tables are not made whole on every server, so their rows differ from one process's.
_WHOLE_BYTES = 1 << 30
_BLOCK_ROWS = 1 << 16


def rows_of(rows, server, servers):
    """How many rows of a table lie on one server."""
    return (rows - server + servers - 1) // servers


def initial(spec, server, servers):
    """This server's part of the table's first value."""
    rows, dim = spec["rows"], spec["dim"]
    own = rows_of(rows, server, servers)
    if spec["initializer"] is None:
        return tf.zeros([own, dim])
    if 4 * rows * dim <= _WHOLE_BYTES:
        initializer = keras.initializers.deserialize(spec["initializer"])
        return initializer((rows, dim), dtype="float32")[server::servers]
    blocks = []
    for first in range(0, own, _BLOCK_ROWS):
        config = dict(spec["initializer"], config=dict(spec["initializer"]["config"]))
        seed = config["config"].get("seed")
        if isinstance(seed, int):
            config["config"]["seed"] = hash((seed, server, first)) % (1 << 31)
        initializer = keras.initializers.deserialize(config)
        blocks.append(initializer((min(_BLOCK_ROWS, own - first), dim), dtype="float32"))
    return tf.concat(blocks, 0)
