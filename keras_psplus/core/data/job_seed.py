"""Random numbers of a job whose script sets no seed: the same on all workers.

Keras and users draw the order of files and rows by Python's and numpy's generators, on each worker
for itself: `keras.utils.image_dataset_from_directory` and `split_dataset` do.
"""

import hashlib
import os
import random

import numpy as np
import tensorflow as tf

from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.core.jobs.control import ControlPlane
from keras_psplus.log import logger
from keras_psplus.tf_internals import context


def agree(control: ControlPlane, with_tensorflow: bool = False) -> None:
    """Has all workers draw the same numbers from here on, unless they do already.

    Args:
        control: Control plane of all workers.
        with_tensorflow: Whether operations of TensorFlow's without a seed draw them, too: as for
            workers that compute with the same rows. Others had better draw their own noise.
    """
    drawn = random.getstate(), np.random.get_state(legacy=False)
    # All starts of a job have its token: where it was lost, it draws again what it drew.
    token = os.environ.get(TOKEN_VARIABLE) or str(random.SystemRandom().random())
    text = f"{_digest(drawn)} {_digest(token)} {context.global_seed()}"
    texts = [one.split() for one in control.exchange("random numbers", text)]
    states, tokens, seeds = zip(*texts)
    if len(set(seeds)) > 1:
        return  # The script sets another seed on each worker.
    is_set = seeds[0] != "None"
    # Of a script with a seed, the first worker's numbers decide, which are the same each time.
    seed = int(states[0] if is_set else tokens[0], 16) % (1 << 31)
    if with_tensorflow and not is_set:
        tf.random.set_seed(seed)
    if len(set(states)) == 1:
        return
    random.seed(seed)
    np.random.seed(seed)
    if control.task.is_chief:
        logger.info(
            "the workers' random numbers differ: all go on from seed %d, so that they shuffle data "
            "alike (`keras.utils.set_random_seed` sets one)",
            seed,
        )


def _digest(of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()[:16]
