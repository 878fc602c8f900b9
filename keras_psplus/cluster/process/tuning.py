"""Settings of TensorFlow and of libraries below it, applied before communication starts."""

import contextlib
import functools
import os
import signal

import tensorflow as tf

from keras_psplus.cluster.process import memory
from keras_psplus.tf_internals import config_pb2, context

_EXPERIMENTS = "GRPC_EXPERIMENTS"
# A thread is woken when a message is there, not for each packet of it (SO_RCVLOWAT).
_SELDOM_WOKEN = "tcp_frame_size_tuning,tcp_rcv_lowat"

# Functions of each worker that servers may have to run at the same time.
STEPS_AT_ONCE = 4
_FURTHER_THREADS = 8


def tune() -> None:
    """Tunes this process's memory and threads: keeps freed memory, wakes fewer threads.

    Forked processes end by SIGTERM.

    Otherwise every packet of a large message wakes a thread, which on a slow link, where packets
    arrive one by one, costs more than training: 264 ms of a processor for each step of a perceptron
    of 5 million weights under `compression="int8"` at 100 Mbit/s, of which 121 are left. And a
    thread of TensorFlow that has run out of work polls for more for a while before it sleeps: with
    one processor, it delays the threads that have some.

    To be called before TensorFlow's runtime is started and gRPC is used first. The user's settings,
    by `GRPC_EXPERIMENTS` or by the variables of `memory.keep_freed_memory`, are kept.
    """
    memory.keep_freed_memory()
    _end_forks_by_sigterm()
    os.environ.setdefault(_EXPERIMENTS, _SELDOM_WOKEN)
    if len(os.sched_getaffinity(0)) == 1:
        _sleep_at_once()


def hide_gpus() -> None:
    """Keeps this process from GPUs, of which TensorFlow would take all memory.

    For tasks that train nothing. Nothing is done where TensorFlow has begun to use GPUs.
    """
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def server_config(workers: int) -> config_pb2.ConfigProto:
    """Configuration of a task's TensorFlow server.

    Each function that a worker runs on a server occupies a thread between operations until it is
    done, also while it waits for the worker's messages. With no thread left, nothing would make
    progress: reads of one worker would wait for those of another, or all without end. The threads
    that wait use no processor time.
    """
    config = config_pb2.ConfigProto()
    given = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    asked = int(given) if given.isdigit() else len(os.sched_getaffinity(0))
    config.inter_op_parallelism_threads = max(asked, STEPS_AT_ONCE * workers + _FURTHER_THREADS)
    if len(os.sched_getaffinity(0)) == 1:
        config.experimental.disable_thread_spinning = True
    return config


def _sleep_at_once() -> None:
    """Has TensorFlow's threads sleep as soon as they have nothing to do."""
    # There is no public way to what the runtime is started with, beyond what tf.config knows.
    runtime, config = context.context(), config_pb2.ConfigProto()
    if runtime._config is not None:
        config.CopyFrom(runtime._config)
    config.experimental.disable_thread_spinning = True
    runtime._config = config


@functools.cache
def _end_forks_by_sigterm() -> None:
    """Has processes forked from now on treat SIGTERM as they would without a cluster.

    TensorFlow's coordination service installs a handler in C that notes SIGTERM and goes on. Forked
    processes inherit it without the thread that reads the note: `terminate()` would not end them,
    and a `join` of them (by a pool of Keras's `PyDataset`, or the script's) would never return.
    """
    os.register_at_fork(after_in_child=_restore_sigterm)


def _restore_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:  # as the process that started Python has set it
        signal.signal(signal.SIGTERM, handler)
