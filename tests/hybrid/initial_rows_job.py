"""Prints the peak of memory while a server's part of a table is made, as a multiple of that part.

initial_rows_job.py [MIB]
"""

import re
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras

from keras_psplus.hybrid.server.shard import TableShard

MIB, DIM, SERVERS = int(sys.argv[1]) if len(sys.argv) > 1 else 192, 32, 2


def memory(what):
    with open("/proc/self/status") as file:
        return int(re.search(rf"{what}:\s+(\d+) kB", file.read())[1]) << 10


def make(rows, initializer):
    config = keras.initializers.serialize(initializer)
    spec = {"key": 0, "name": "table", "rows": rows, "dim": DIM, "initializer": config}
    return TableShard(spec, 0, SERVERS, None, None, replicas=1, sync=True)


def main():
    initializer = keras.initializers.RandomUniform(seed=1)
    # Whatever the first table of a process takes beside its rows.
    make(1 << 15, initializer)
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        # The peak is that from now on.
        file.write("5")
    shard = make((MIB << 20) // (4 * DIM) - 1, initializer)
    print((memory("VmHWM") - before) / (4 * shard.weights.shape.num_elements()), flush=True)


if __name__ == "__main__":
    main()
