"""Hooks of Keras variables: creation, reads, writes, and seeds of random layers."""

from typing import Any

from keras_psplus.engine import Engine
from keras_psplus.keras_hooks.finders import of_scope, of_step, of_variable
from keras_psplus.keras_hooks.hook import Hook
from keras_psplus.keras_internals.keras_parts import Variable, numpy_module, seed_generator


def _of_taken(x: Any) -> Engine | None:
    return of_variable(x) if isinstance(x, Variable) else None


HOOKS = (
    Hook(
        Variable,
        "__init__",
        ["self", "initializer"],
        of_scope,
        "make_variable",
        "what is read, changed or looked up later is asked of the strategy that made it",
    ),
    Hook(
        Variable,
        "_initialize",
        ["self", "value"],
        of_scope,
        "initialize",
        "totals and means are made global once a step; variables get their place",
    ),
    Hook(
        Variable,
        "_initialize_with_initializer",
        ["self", "initializer"],
        of_scope,
        "initialize_with_initializer",
        "the rows of a table are drawn by the servers that have them",
    ),
    Hook(
        Variable,
        "_direct_assign",
        ["self", "value"],
        of_variable,
        "assign",
        "what a replica changes by itself is made global; steps under way come before",
    ),
    Hook(
        Variable,
        "numpy",
        ["self"],
        of_variable,
        "read",
        "steps under way come before",
    ),
    Hook(
        Variable,
        "assign_add",
        ["self", "value"],
        of_variable,
        "assign_add",
        "Keras reads, adds and writes: another worker's update in between would be lost",
    ),
    Hook(
        Variable,
        "assign_sub",
        ["self", "value"],
        of_variable,
        "assign_sub",
        "Keras reads, subtracts and writes: another worker's update in between would be lost",
    ),
    Hook(
        Variable,
        "__float__",
        ["self"],
        of_variable,
        "to_float",
        "TensorFlow's mirrored variables lack what callbacks do with a learning rate",
    ),
    Hook(
        Variable,
        "__int__",
        ["self"],
        of_variable,
        "to_int",
        "TensorFlow's mirrored variables lack what callbacks do with a counter",
    ),
    Hook(
        Variable,
        "sparse_read",
        ["self", "indices", "name"],
        of_variable,
        "read_rows",
        "tf.gather asks for it: without it, each lookup reads the whole value",
        is_added=True,
    ),
    Hook(
        numpy_module,
        "take",
        ["x", "indices", "axis"],
        _of_taken,
        "take",
        "Keras reads the whole value for its shape",
    ),
    Hook(
        seed_generator.SeedGenerator,
        "next",
        ["self", "ordered"],
        of_step,
        "next_seed",
        "replicas draw different numbers from one state",
    ),
)
