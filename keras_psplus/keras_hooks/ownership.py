"""Whose strategy is it? What every hook asks before it does anything."""

import weakref

import tensorflow as tf

from keras_psplus.all_reduce import step as step_module
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy
from keras_psplus.parameter_server.strategy import ParameterServerStrategy

_live = weakref.WeakSet()


def ours(strategy):
    """The strategy if it is one of this library's that train in step and `is_active`, else None."""
    if isinstance(strategy, MultiWorkerMirroredStrategy) and strategy.is_active:
        note_live(strategy)
        return strategy
    return None


def asynchronous(strategy):
    """The strategy if it is this library's ParameterServerStrategy, else None."""
    return strategy if isinstance(strategy, ParameterServerStrategy) else None


def distributing(strategy):
    """The strategy if it is one of this library's that distributes training, else None."""
    return ours(strategy) or asynchronous(strategy)


def our_scope():
    """The strategy of this library whose scope or replica context this is, else None."""
    return ours(tf.distribute.get_strategy())


def our_step():
    """The step of one of our replicas that is being traced or run, else None."""
    return step_module.current()


def note_live(strategy):
    """Notes that a strategy of this library distributes training in this process."""
    _live.add(strategy)


def another_is_live():
    """Whether a strategy of this library distributes training in this process."""
    return bool(_live)
