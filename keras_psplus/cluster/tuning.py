"""What a task tells the libraries below TensorFlow before it talks to others."""

import os

from keras_psplus.cluster import memory

_EXPERIMENTS = "GRPC_EXPERIMENTS"
# A thread is woken when a message is there, not for each packet of it (SO_RCVLOWAT).
_SELDOM_WOKEN = "tcp_frame_size_tuning,tcp_rcv_lowat"


def tune():
    """Has this process keep freed memory, and its gRPC wake threads for whole messages.

    Every packet of a large message wakes a thread otherwise, which on a slow link, where they come
    one by one, costs more than training: 264 ms of a processor for each step of a perceptron of 5
    million weights under `compression="int8"` at 100 Mbit/s, of which 121 are left.

    To be called before gRPC is used first. What the user has chosen stays, by `GRPC_EXPERIMENTS` or
    by the variables of `memory.keep_freed_memory`.
    """
    memory.keep_freed_memory()
    os.environ.setdefault(_EXPERIMENTS, _SELDOM_WOKEN)
