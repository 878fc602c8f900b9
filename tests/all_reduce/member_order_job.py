"""Tasks 2 and 10 of a cluster of eleven, of which task 0 leads and the others are not there."""

import json
import os
import pathlib
import sys

from tests import quick_start  # noqa: F401

# isort: split
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.eager import context

from keras_psplus.all_reduce.collectives import operations
from tests.support import jobs

TASKS, ALL = (0, 2, 10), 11
LEADER = "/job:worker/replica:0/task:0"


def main():
    config = json.loads(os.environ["TF_CONFIG"])
    index = TASKS[config["task"]["index"]]
    addresses = [f"127.0.0.1:{i + 1}" for i in range(ALL)]
    for task, address in zip(TASKS, config["cluster"]["worker"], strict=True):
        addresses[task] = address
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({"worker": addresses}).as_cluster_def(),
        job_name="worker",
        task_index=index,
        protocol="grpc",
    )
    server.default_session_config.experimental.collective_group_leader = LEADER
    context.context().configure_collective_ops(
        collective_leader=LEADER, device_filters=[f"/job:worker/task:{index}"]
    )
    context.context().enable_collective_ops(server)
    device = f"/job:worker/replica:0/task:{index}/device:CPU:0"
    options = tf.distribute.experimental.CommunicationOptions()

    def launcher_of(key, tasks):
        names = [f"/job:worker/replica:0/task:{task}" for task in tasks]
        keys = cross_device_utils.CollectiveKeys()
        return operations.Launcher(key, len(tasks), keys, device, options, names)

    if index:
        launcher, rank = launcher_of(7, TASKS[1:]), TASKS[1:].index(index)

        @tf.function(autograph=False)
        def step():
            own = tf.constant([float(index)])
            rows, counts = launcher.gather_rows(tf.fill([rank + 1, 1], index))
            exchanged = launcher.all_to_all(tf.constant([[index, 0], [index, 1]]))
            return launcher.gather(own), rows, counts, exchanged

        gathered, rows, counts, exchanged = step()
        np.testing.assert_array_equal(gathered, [2, 10])
        np.testing.assert_array_equal(rows, [[2], [10], [10]])
        np.testing.assert_array_equal(counts, [1, 2])
        # The row of this one's rank from each, in rank order.
        np.testing.assert_array_equal(exchanged, [[2, rank], [10, rank]])
    np.testing.assert_array_equal(launcher_of(8, TASKS).gather(tf.constant([index])), TASKS)
    # None may end before the others have all that it sends them.
    folder = pathlib.Path(sys.argv[1])
    (folder / str(index)).touch()
    jobs.wait_for(lambda: len(list(folder.iterdir())) == len(TASKS))
    print("as expected", flush=True)


if __name__ == "__main__":
    main()
