"""Seeds of a job: of its data's order, and of a script without any."""

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.core.jobs.control import ControlPlane
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

# Seeds of the order of data, which take none of Python's random numbers away.
#
# Keras draws the seeds of layers from these. In one process `fit` draws none, so that whatever is
# made after it has the same weights here only if nothing else is drawn either. So a seed is made of
# what Python would draw next, of TensorFlow's seed, and of how many were made of these before.

_LARGEST = int(1e9)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Context after which a script draws by Python and numpy what it would have drawn."""
    again = _remembered_by_python()
    try:
        yield
    finally:
        again()


def remembered() -> Callable[[], None]:
    """Function that has Python, numpy and TensorFlow draw again what they draw from now on."""
    by_python = _remembered_by_python()
    # Of the seeds of operations, if there is a global one.
    generator = getattr(context.context(), "_rng", None)
    of_operations = None if generator is None else generator.getstate()

    def again() -> None:
        by_python()
        if generator is not None:
            generator.setstate(of_operations)

    return again


def _remembered_by_python() -> Callable[[], None]:
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()

    def again() -> None:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)

    return again


class _Draws:
    """Numbers that were drawn of one state.

    `keras.utils.set_random_seed` may set a state that was there before. It has TensorFlow make
    another generator, by which that is known, as `tf.random.set_seed` does.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._generator: Any = None
        self._count = 0

    def _count_now(self) -> int:
        """The number of those of Python's state of now."""
        state, generator = random.getstate(), getattr(context.context(), "_rng", None)
        if state != self._state or generator is not self._generator:
            self._state, self._generator, self._count = state, generator, 0
        return self._count

    def draw(self) -> int:
        """Draws the seed of some data's order, which `keras.utils.set_random_seed` settles."""
        copy, before = random.Random(), self._count_now()
        copy.setstate(self._state)
        self._count += 1
        text = f"{copy.getrandbits(64)} {context.global_seed()} {before}"
        return random.Random(text).randint(1, _LARGEST)

    def state(self) -> list[Any]:
        """State that the next seeds depend on, for `restore`: a list that JSON can have."""
        version, numbers, gauss = random.getstate()
        return [version, list(numbers), gauss, self._count_now()]

    def restore(self, state: list[Any]) -> None:
        """Sets Python's random numbers, and how many seeds were drawn, to what they were."""
        version, numbers, gauss, count = state
        random.setstate((version, tuple(numbers), gauss))
        self._count_now()
        self._count = count


_draws = _Draws()
draw, state, restore = _draws.draw, _draws.state, _draws.restore


# Random numbers of a job whose script sets no seed: the same on all workers.
#
# Keras and users draw the order of files and rows by Python's and numpy's generators, on each
# worker for itself: `keras.utils.image_dataset_from_directory` and `split_dataset` do.


def agree(control: ControlPlane, with_tensorflow: bool = False) -> None:
    """Has all workers draw the same numbers from here on, unless they do already.

    Args:
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
