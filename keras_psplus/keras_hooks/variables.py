"""Hooks of Keras variables: creation, reads, writes, and seeds of random layers."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.engine import Call, Engine
from keras_psplus.keras_hooks.hook import Hook, of_scope, of_step, of_variable
from keras_psplus.keras_internals.keras_parts import Variable, numpy_module, seed_generator


def _of_taken(x: Any) -> Engine | None:
    return of_variable(x) if isinstance(x, Variable) else None


def to_float(call: Call) -> float:
    """`float(variable)`."""
    return float(_to_number(float, call))


def to_int(call: Call) -> int:
    """`int(variable)`."""
    return int(_to_number(int, call))


def _to_number(number: Callable[[Any], Any], call: Call) -> Any:
    if isinstance(call.owner._value, tf.distribute.DistributedValues):
        return number(call.owner._value.numpy())
    return call.proceed()


HOOKS = (
    Hook(
        Variable,
        "__init__",
        ["self", "initializer", "shape"],
        of_scope,
        "make_variable",
        "what is read, changed or looked up later is asked of the strategy that made it",
        call="make_variable",
    ),
    Hook(
        Variable,
        "_initialize",
        ["self", "value"],
        of_scope,
        "make_variable",
        "totals and means are made global once a step; variables get their place",
        call="initialize",
    ),
    Hook(
        Variable,
        "_initialize_with_initializer",
        ["self", "initializer"],
        of_scope,
        "make_variable",
        "the rows of a table are drawn by the servers that have them",
        call="initialize_with_initializer",
    ),
    Hook(
        Variable,
        "_direct_assign",
        ["self", "value"],
        of_variable,
        "write",
        "what a replica changes by itself is made global; steps under way come before",
        call="assign",
    ),
    Hook(Variable, "numpy", ["self"], of_variable, "read", "steps under way come before"),
    Hook(
        Variable,
        "assign_add",
        ["self", "value"],
        of_variable,
        "write",
        "Keras reads, adds and writes: another worker's update in between would be lost",
    ),
    Hook(
        Variable,
        "assign_sub",
        ["self", "value"],
        of_variable,
        "write",
        "Keras reads, subtracts and writes: another worker's update in between would be lost",
    ),
    Hook(
        Variable,
        "__float__",
        ["self"],
        of_variable,
        to_float,
        "TensorFlow's mirrored variables lack what callbacks do with a learning rate",
    ),
    Hook(
        Variable,
        "__int__",
        ["self"],
        of_variable,
        to_int,
        "TensorFlow's mirrored variables lack what callbacks do with a counter",
    ),
    Hook(
        Variable,
        "sparse_read",
        ["self", "indices", "name"],
        of_variable,
        "read",
        "tf.gather asks for it: without it, each lookup reads the whole value",
        is_added=True,
    ),
    Hook(
        numpy_module,
        "take",
        ["x", "indices", "axis"],
        _of_taken,
        "read",
        "Keras reads the whole value for its shape",
    ),
    Hook(
        seed_generator.SeedGenerator,
        "next",
        ["self", "ordered"],
        of_step,
        "layer",
        "replicas draw different numbers from one state",
        call="next_seed",
    ),
)
