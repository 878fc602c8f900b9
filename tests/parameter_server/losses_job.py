"""Errors as TensorFlow raises them where tasks are lost, and how they are understood.

losses_job.py: a chief, which starts the servers. It prints, by case, the error's class, and whether
it is of a lost worker and of a lost parameter server.
"""

import ctypes
import json
import os
import signal
import sys

from tests import quick_start  # noqa: F401

# isort: split
import tensorflow as tf

from keras_psplus.cluster.ports import free_ports
from keras_psplus.parameter_server import worker_function
from keras_psplus.parameter_server.queue import RemoteWorker, WorkerCalls
from keras_psplus.tf_internals import context

# As the strategy does: a lost task's RPCs fail at once, and no stream waits for it.
os.environ["GRPC_FAIL_FAST"] = "use_caller"
os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
CHIEF, WORKER_AT, PS = (f"127.0.0.1:{port}" for port in free_ports(3))
SPEC = {"chief": [CHIEF], "worker": [WORKER_AT], "ps": [PS]}
WORKER = "/job:worker/replica:0/task:0"


class Server:
    """A server in a process that is there before TensorFlow's runtime is, and waits."""

    def __init__(self, job):
        waits, self._start = os.pipe()
        self._serves, serves = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            # It ends with this process, at the latest.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            os.read(waits, 1)
            server = tf.distribute.Server(SPEC, job_name=job, task_index=0)
            os.write(serves, b"1")
            server.join()

    def start(self):
        os.write(self._start, b"1")
        os.read(self._serves, 1)

    def end(self):
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def error_of(function, *args):
    try:
        for output in tf.nest.flatten(CALLS.call(function, *args)):
            worker_function.to_chief(output)
    except tf.errors.OpError as error:
        CALLS.clear_error()
        return error
    return None


def note(case, error):
    error = worker_function.as_loss(error, WORKER) if error is not None else None
    found = [
        type(error).__name__,
        worker_function.is_worker_loss(error),
        worker_function.is_server_loss(error),
    ]
    print(json.dumps([case, *found]), flush=True)
    if os.environ.get("SHOW"):
        print(error, file=sys.stderr)


worker, ps, next_worker, next_ps = map(Server, ("worker", "ps", "worker", "ps"))
CALLS = WorkerCalls(RemoteWorker(0))
worker.start()
ps.start()
tf.config.experimental_connect_to_cluster(
    tf.train.ClusterSpec(SPEC), job_name="chief", protocol="grpc"
)
with tf.device("/job:ps/replica:0/task:0"):
    variable = tf.Variable(tf.zeros([3]))


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


SCALAR = tf.TensorSpec([], tf.float32)
read = traced(lambda x: variable * x, SCALAR)
check = traced(lambda x: tf.ensure_shape(tf.ones([tf.cast(x, tf.int32)]), [2]), SCALAR)
add = traced(lambda x: variable.scatter_nd_add([[7]], [x]), SCALAR)
one = tf.constant(1.0)
assert error_of(read, one) is None
note("check on a worker", error_of(check, one))
note("index on a server", error_of(add, one))
with tf.device(WORKER):
    on_lost = tf.identity(one)
worker.end()
note("lost worker", error_of(read, one))
next_worker.start()
note("worker started again", error_of(read, one))
context.context().update_server_def(context.get_server_def())
assert error_of(read, one) is None
note("its tensors", error_of(read, on_lost))
ps.end()
note("lost server", error_of(read, one))
next_ps.start()
note("server started again", error_of(read, one))
os._exit(0)
