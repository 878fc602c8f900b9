"""Operations and functions that the chief runs on a worker."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import atomic_function, context, execute, executor

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@contextlib.contextmanager
def on_worker(index: int, device: str | None = "CPU:0") -> Iterator[None]:
    """Context in which operations run on a worker, one after another.

    The device None leaves that to TensorFlow, as steps do.
    """
    task = f"/job:worker/replica:0/task:{index}"
    own = executor.new_executor(enable_async=False)
    try:
        with context.executor_scope(own), tf.device(f"{task}/device:{device}" if device else task):
            yield
    finally:
        # The end of data is an error to the executor, which would raise it once more.
        own.clear_error()


def call(
    concrete: tf.types.experimental.ConcreteFunction, *args: Any, cancellation: Any = None
) -> list[tf.Tensor]:
    """Calls a concrete function eagerly; returns its outputs, flat.

    TensorFlow keeps what cancels a call where any thread's next call finds it. Here it is the
    call's own.
    """
    own, flat = context.context(), tf.nest.flatten(args, expand_composites=True)
    options = own.function_call_options.as_attrs().items()
    called = {
        "num_outputs": len(concrete.outputs),
        "inputs": [*(leaf for leaf in flat if leaf is not None), *concrete.captured_inputs],
        "attrs": tuple(itertools.chain(*options)),
        "ctx": own,
    }
    name = concrete.name.decode()
    if cancellation is None:
        return execute.execute(name, **called)
    return execute.execute_with_cancellation(name, **called, cancellation_manager=cancellation)


def with_stacks(
    concrete: tf.types.experimental.ConcreteFunction,
) -> contextlib.AbstractContextManager[None]:
    """Context that adds the lines which made an operation to the error of a call."""
    return atomic_function.InterpolateRuntimeError(concrete.inference_fn)


def to_chief(tensor: tf.Tensor) -> tf.Tensor:
    """Copies a worker's tensor into the chief's memory: workers do not talk to each other."""
    with tf.device(CHIEF):
        # `tf.identity` and `cpu` raise RuntimeError if the worker is lost.
        return tf.raw_ops.Identity(input=tensor)
