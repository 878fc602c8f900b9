"""What the chief says when a parameter server or all workers are gone."""

import contextlib
import re

import tensorflow as tf


class ParameterServerLostError(RuntimeError):
    """A parameter server has died, and with it the variables that it held."""


@contextlib.contextmanager
def explained(strategy):
    """Names the parameter server when TensorFlow fails for want of one."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        found = re.search(r"/job:ps/replica:0/task:(\d+)", str(error))
        if not found:
            raise
        index = int(found.group(1))
        addresses = strategy.cluster_resolver.cluster_spec().as_dict()["ps"]
        raise ParameterServerLostError(
            f"ps-{index} ({addresses[index]}) stopped answering; the variables that it held are "
            "lost. Look into that task's log, then start the whole job again: with the "
            "BackupAndRestore callback training resumes where the last backup was made. "
            f"Received: {str(error).splitlines()[0][:300]}"
        ) from error
