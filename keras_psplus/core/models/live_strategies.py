"""Registry of the strategies that distribute training in this process.

A strategy's constructor registers it. From then on a model that was built outside of every scope
would train on each worker by itself, from other initial weights, so the hooks refuse it unless the
script asks for that with `single_process`.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keras_psplus import activation
from keras_psplus.core.base.thread_value import ThreadFlag

if TYPE_CHECKING:
    import tensorflow as tf

_live: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
# A process cannot leave its cluster: these count until it ends.
_of_clusters: list[tf.distribute.Strategy] = []
_COLLECTIONS = 3

_single = ThreadFlag()


def note(strategy: tf.distribute.Strategy, in_cluster: bool) -> None:
    """Notes that a strategy distributes training in this process.

    Args:
        in_cluster: Whether it connects this process to others.
    """
    _live.add(strategy)
    if in_cluster:
        _of_clusters.append(strategy)


def exist() -> bool:
    """Whether there is a strategy that distributes training in this process."""
    return bool(_live)


def forget_unused() -> None:
    """Collects strategies that are no longer referenced."""
    if not _of_clusters:
        # What one collection frees may be what holds the next.
        for _ in range(_COLLECTIONS):
            if not gc.collect():
                break


def in_single_process() -> bool:
    """Whether this thread is in a context of `single_process`."""
    return bool(_single)


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Context in which models from outside a strategy's scope train locally.

    Beside a strategy that distributes training, `compile`, `fit`, `train_on_batch`, `evaluate` and
    `test_on_batch` refuse such models: each worker would train a separate copy, by mistake. In this
    context they work as without the strategy: every process trains or evaluates its copy on all of
    its data, without communication. `predict` does so outside of the context as well, and logs a
    line. Models that were built in the strategy's scope are trained by the strategy here, too. The
    context holds for the thread that has entered it.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    with keras_psplus.single_process():
        baseline = keras.Sequential([keras.layers.Dense(10)])
        baseline.compile(optimizer="sgd", loss="mse")
        baseline.fit(x, y)
    ```
    """
    activation.activate()
    with _single.raised():
        yield
