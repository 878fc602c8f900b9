"""What a task tells TensorFlow, and the libraries below it, before it talks to others."""

import os

from keras_psplus.cluster import memory
from keras_psplus.tf_internals import config_pb2, context

_EXPERIMENTS = "GRPC_EXPERIMENTS"
# A thread is woken when a message is there, not for each packet of it (SO_RCVLOWAT).
_SELDOM_WOKEN = "tcp_frame_size_tuning,tcp_rcv_lowat"


def tune() -> None:
    """Has this process keep freed memory, and wake and keep busy no more threads than it has to.

    Every packet of a large message wakes a thread otherwise, which on a slow link, where they come
    one by one, costs more than training: 264 ms of a processor for each step of a perceptron of 5
    million weights under `compression="int8"` at 100 Mbit/s, of which 121 are left. And a thread of
    TensorFlow that has run out of work asks for more for a while before it sleeps: with one
    processor, it is in the way of those that have some.

    To be called before TensorFlow's runtime is started and gRPC is used first. What the user has
    chosen stays, by `GRPC_EXPERIMENTS` or by the variables of `memory.keep_freed_memory`.
    """
    memory.keep_freed_memory()
    os.environ.setdefault(_EXPERIMENTS, _SELDOM_WOKEN)
    if len(os.sched_getaffinity(0)) == 1:
        _sleep_at_once()


def _sleep_at_once():
    """Has TensorFlow's threads sleep as soon as they have nothing to do."""
    # There is no public way to what the runtime is started with, beyond what tf.config knows.
    runtime, config = context.context(), config_pb2.ConfigProto()
    if runtime._config is not None:
        config.CopyFrom(runtime._config)
    config.experimental.disable_thread_spinning = True
    runtime._config = config
