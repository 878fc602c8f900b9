"""Decides whether an optimizer's state is cut, or whole on one worker, or on all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import filterfalse
from typing import Any

import keras
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.keras_internals.keras_parts import base_optimizer, tf_optimizer
from keras_psplus.sharding.places import Place
from keras_psplus.sharding.variable import ShareVariable

_BASE, _TF = base_optimizer.BaseOptimizer, tf_optimizer.TFOptimizer
# Keras's optimizers whose `update_step` computes each element from the same one of the state.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"),
        "ScheduleFreeAdamW",
    )
    if hasattr(keras.optimizers, name)
)
# Methods that see all variables at once, and the classes whose own can work on some of them.
_METHODS = {
    "_backend_apply_gradients": (_BASE,),
    "_backend_update_step": (_TF, keras.optimizers.Nadam),
    "_apply_weight_decay": (_TF, getattr(keras.optimizers, "Muon", _TF)),
    "_clip_gradients": (_BASE,),
    "_update_model_variables_moving_average": (_BASE,),
}
_NOT_KNOWN = "its update is not known to be element-wise"
_LISTS_OF_KERAS = ("_variables", "_trainable_variables", "_accumulated_gradients")


class OptimizerPlan:
    """Places of the state of each variable that an optimizer trains.

    Attributes:
        places: List of `Place`, one for each of its variables.
        reason: Words for why it is not cut; None if it is.
        has_slots: Whether it keeps anything in shares.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, workers: int) -> None:
        self._workers = workers
        self.has_slots = has_slots_in_shares(optimizer)
        variables = optimizer._trainable_variables
        self.reason = foreign_method(optimizer)
        if self.reason is not None:
            self.places = [Place()] * len(variables)
            return
        states = list(self._other_states(optimizer))
        if _is_elementwise(optimizer) and not any(tuple(state.shape) for state, _ in states):
            self.places = [
                Place() if self._is_remote(v) else Place.of_parts(tuple(v.shape), workers)
                for v in variables
            ]
            return
        shared = [state.path for state, number in states if number is None]
        if shared:
            self.reason = f"variable '{shared[0]}' is of no one variable of the model"
            self.places = [Place()] * len(variables)
            return
        self.reason = _NOT_KNOWN
        here = [number for number, v in enumerate(variables) if not self._is_remote(v)]
        own = [variables[number] for number in here]
        sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in own]
        owners = dict(zip(here, _balanced(sizes, workers)))
        self.places = [Place(owner=owners.get(number)) for number in range(len(variables))]

    @property
    def in_updates(self) -> list[Place]:
        """Places of the variables among the workers that update parts of them."""
        return self.places

    def _is_remote(self, variable: keras.Variable) -> bool:
        """Whether other tasks keep a variable."""
        return False

    def _other_states(self, optimizer: Any) -> Iterator[tuple[keras.Variable, int | None]]:
        """Yields variables that are no slots in shares, and numbers of their model variables.

        What an optimizer has in a list, one for each variable, is for the variable of that place,
        which is how optimizers look it up.
        """
        numbers: dict[int, int] = {}
        count = len(optimizer._trainable_variables)
        for name, value in vars(optimizer).items():
            if isinstance(value, list) and len(value) == count and name not in _LISTS_OF_KERAS:
                for number, one in enumerate(value):
                    if isinstance(one, keras.Variable):
                        numbers[id(one)] = number
        known = [optimizer._iterations, optimizer._learning_rate]
        if optimizer.gradient_accumulation_steps:
            known += optimizer._accumulated_gradients
        seen = {id(one) for one in known}
        for variable in filterfalse(self._is_remote, optimizer.variables):
            if id(variable) not in seen and not isinstance(variable._value, ShareVariable):
                yield variable, numbers.get(id(variable))

    def states_to_move(
        self, optimizer: keras.optimizers.Optimizer
    ) -> Iterator[tuple[keras.Variable, Place]]:
        """Yields mirrored variables whose value their owner alone changes, and their places."""
        for state, number in self._other_states(optimizer):
            if number is not None and not self.places[number].is_everywhere:
                if not isinstance(state._value, ShareVariable) and self.places[number].cut is None:
                    yield state, self.places[number]

    def describe(
        self, optimizer: keras.optimizers.Optimizer, names: Sequence[str], places: Sequence[int]
    ) -> str:
        """Table of what each worker keeps of the optimizer.

        Args:
            names: Names of the workers, in rank order.
            places: Their places among those that share a variable.
        """
        here = [not self._is_remote(v) for v in optimizer._trainable_variables]
        count, has = sum(here), [0] * self._workers
        whole = on_all = 0
        for variable in filterfalse(self._is_remote, optimizer.variables):
            size = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
            whole += size
            if not isinstance(variable._value, ShareVariable):
                on_all += size
                continue
            place = variable._value.place
            for rank in range(self._workers):
                shape = place.local_shape(variable.shape, rank)
                has[rank] += math.prod(shape) * tf.as_dtype(variable.dtype).size
        if self.reason is None:
            how = f"the slots of {count} variables are cut into equal parts"
        elif all(place.is_everywhere for place in self.places):
            how = f"nothing is cut ({self.reason})"
        else:
            how = f"the slots of {count} variables lie whole on one worker each ({self.reason})"
        rows = [("worker", "optimizer MB", "of all")]
        rows += [
            (name, f"{(has[i] + on_all) / 1e6:.2f}", f"{(has[i] + on_all) / max(1, whole):.0%}")
            for name, i in zip(names, places)
        ]
        return (
            f"'{optimizer.name}' in shares: {how}; of {whole / 1e6:.2f} MB, {on_all / 1e6:.2f} MB "
            f"are on every worker\n{text_table.aligned(rows)}"
        )


def has_slots_in_shares(optimizer: keras.optimizers.Optimizer) -> bool:
    return any(isinstance(one._value, ShareVariable) for one in optimizer.variables)


def reason_for_wholes(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Words for why an optimizer's update needs whole weights; None if parts will do."""
    return foreign_method(optimizer) or (None if _is_elementwise(optimizer) else _NOT_KNOWN)


def _is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    return _defines(type(optimizer), "update_step") in _ELEMENTWISE


def _defines(cls: type, name: str) -> type | None:
    """The class of an optimizer's that defines a method of it."""
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def foreign_method(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Words for why all workers have to update all weights; None if they need not."""
    for name, known in _METHODS.items():
        if _defines(type(optimizer), name) not in known:
            return f"it has a `{name}` of its own"
    return None


def _balanced(sizes: Sequence[int], workers: int) -> list[int]:
    """Owners of items, the largest first, each to the worker that has least."""
    loads, owners = [0] * workers, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners
