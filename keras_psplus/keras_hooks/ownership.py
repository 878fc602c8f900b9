"""Whose strategy is it? What every hook asks before it does anything."""

import tensorflow as tf

from keras_psplus.all_reduce import step as step_module
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy
from keras_psplus.parameter_server.strategy import ParameterServerStrategy


def ours(strategy):
    """The strategy if it is one of this library's that train in step and `is_active`, else None."""
    if isinstance(strategy, MultiWorkerMirroredStrategy) and strategy.is_active:
        return strategy
    return None


def asynchronous(strategy):
    """The strategy if it is this library's ParameterServerStrategy, else None."""
    return strategy if isinstance(strategy, ParameterServerStrategy) else None


def distributing(strategy):
    """The strategy if it is one of this library's that distributes training, else None."""
    return ours(strategy) or asynchronous(strategy)


def of_this_library(strategy):
    """The strategy if it is one of this library's, with any number of replicas, else None."""
    classes = MultiWorkerMirroredStrategy, ParameterServerStrategy
    return strategy if isinstance(strategy, classes) else None


def our_scope():
    """The strategy of this library whose scope or replica context this is, else None."""
    return ours(tf.distribute.get_strategy())


def our_step():
    """The step of one of our replicas that is being traced or run, else None."""
    return step_module.current()
