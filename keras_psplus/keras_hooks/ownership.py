"""Whose strategy is it? What every hook asks before it does anything."""

import weakref

import tensorflow as tf

from keras_psplus.all_reduce import step as step_module
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy

_replicated = weakref.WeakSet()


def ours(strategy):
    """The strategy if it is one of this library's with several replicas, else None."""
    if isinstance(strategy, MultiWorkerMirroredStrategy) and strategy.num_replicas_in_sync > 1:
        _replicated.add(strategy)
        return strategy
    return None


def our_scope():
    """The strategy of this library whose scope or replica context this is, else None."""
    return ours(tf.distribute.get_strategy())


def our_step():
    """The step of one of our replicas that is being traced or run, else None."""
    return step_module.current()


def another_is_live():
    """A strategy of this library with several replicas that exists in this process, else None."""
    return next(iter(_replicated), None)
