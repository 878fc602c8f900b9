"""Operations that the chief runs on a worker, outside of any step."""

import tensorflow as tf

from keras_psplus.tf_internals import cluster_coordinator, context, executor

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class on_worker:
    """Context in which operations run on a worker, one after another.

    Args:
        index: Number of the worker.
        device: Its device; None leaves that to TensorFlow, as steps do.
    """

    def __init__(self, index: int, device: str | None = "CPU:0") -> None:
        task = f"/job:worker/replica:0/task:{index}"
        self._device = tf.device(f"{task}/device:{device}" if device else task)
        self._executor = executor.new_executor(enable_async=False)

    def __enter__(self) -> None:
        self._scope = context.executor_scope(self._executor)
        self._scope.__enter__()
        self._device.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._device.__exit__(*exc)
        self._scope.__exit__(*exc)
        # The end of data is an error to the executor, which would raise it once more.
        self._executor.clear_error()


def to_chief(tensor: tf.Tensor) -> tf.Tensor:
    """Copies a worker's tensor into the chief's memory: workers do not talk to each other."""
    with tf.device(CHIEF):
        # `tf.identity` and `cpu` raise RuntimeError if the worker is lost.
        return tf.raw_ops.Identity(input=tensor)


def is_of_worker(error: BaseException) -> bool:
    """Whether an error says that a worker is unreachable or was restarted."""
    if not isinstance(error, tf.errors.OpError):
        return False
    # What is said of something that was on a worker before it was started again.
    restarted = "have been restarted" in error.message or "invalid device" in error.message
    return restarted or cluster_coordinator._is_worker_failure(error)
