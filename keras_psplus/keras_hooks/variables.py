"""Hooks of variables, of saving, and of TensorFlow's and Python's runtime."""

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.cluster.process.signals import EXITS, UNCAUGHT
from keras_psplus.core.models import model_saving
from keras_psplus.engine import Call, Engine
from keras_psplus.keras_hooks.hook import (
    Hook,
    of_archive,
    of_exported,
    of_holder,
    of_scope,
    of_step,
    of_variable,
)
from keras_psplus.keras_internals.keras_parts import (
    ExportArchive,
    Variable,
    io_utils,
    model_module,
    numpy_module,
    saving_lib,
    seed_generator,
)
from keras_psplus.serving import export_archive, export_model
from keras_psplus.tf_internals import context, distributed_values, func_graph, resource_variable_ops

# Hooks of Keras variables: creation, reads, writes, and seeds of random layers.


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


VARIABLES = (
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


# Saving: files and folders appear whole, and the paths that are shown are the script's.


def _of_writing(_: Any) -> object | None:
    return model_saving.SHOWN if model_saving.SHOWN.is_writing else None


SAVING = (
    *(
        Hook(
            model_module.Model,
            name,
            ["self", "filepath", "overwrite"],
            of_holder,
            "save",
            "files appear whole, whichever workers write them",
        )
        for name in ("save", "save_weights")
    ),
    Hook(
        model_module.Model,
        "export",
        ["self", "filepath", "format"],
        of_exported,
        export_model,
        "folders appear whole; variables of parameter servers are copied to the chief; so are "
        "dynamic tables, which are part of the graph then",
    ),
    Hook(
        ExportArchive,
        "write_out",
        ["self", "filepath"],
        of_archive,
        export_archive,
        "as `export`: what is exported is traced then",
        call="export",
    ),
    Hook(
        saving_lib,
        "get_attr_skipset",
        ["obj_type"],
        of_scope,
        model_saving.attributes_to_skip,
        "Keras makes an optimizer to see its attributes, which must not be in the scope",
    ),
    Hook(
        saving_lib,
        "is_memory_sufficient",
        ["model"],
        of_holder,
        "save",
        "Keras has a whole model in memory before it is in a file, if this machine has room for it",
        call="has_memory_for_file",
    ),
    Hook(
        io_utils,
        "print_msg",
        ["message"],
        _of_writing,
        "show_message",
        "Keras says the path that the script has given, not that of a temporary folder",
    ),
)


# TensorFlow's runtime and Python: variables and a process's end.
#
# Where a strategy answers for single objects only, the object has the answer in an attribute. The
# last entries are not replaced as a whole: a module changes them for objects of its own.


def _if_watched(_: Any) -> object | None:
    return EXITS if EXITS.is_watching else None


def _of_uncaught(_: Any) -> object:
    return UNCAUGHT


def _of_rows(variable: Any) -> Any:
    return vars(variable).get("_row_reads")


RUNTIME = (
    Hook(
        sys,
        "exit",
        ["status"],
        _if_watched,
        "note",
        "servers learn whether the script has ended well, which functions of atexit are not told",
    ),
    Hook(
        sys,
        "excepthook",
        [],
        _of_uncaught,
        "show",
        "peers hear of an error that ends the script",
    ),
    *(
        Hook(
            distributed_values.DistributedVariable,
            name,
            ["self", "indices", "name"],
            _of_rows,
            name,
            "TensorFlow reads a mirrored variable as a whole to look up rows",
        )
        for name in ("sparse_read", "gather_nd")
    ),
    Hook(
        resource_variable_ops.ResourceVariable,
        "_read_variable_op",
        ["self"],
        None,
        "parameter_server.extended",
        "a variable on a server is given a class whose reads a worker's function shares",
    ),
    Hook(
        func_graph,
        "func_graph_from_py_func",
        ["name", "python_func"],
        None,
        "tf_internals.trace_end",
        "operations are added at the end of a trace, by the list that its outputs go to",
    ),
    Hook(
        context.Context,
        "ensure_initialized",
        ["self"],
        None,
        "cluster.process.early_init",
        "the call that starts the runtime too early is named; from the import to that call",
    ),
)
