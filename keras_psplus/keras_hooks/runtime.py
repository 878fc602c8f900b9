"""TensorFlow's runtime and Python: variables and a process's end.

Where a strategy answers for single objects only, the object has the answer in an attribute. The
last entries are not replaced as a whole: a module changes them for objects of its own.
"""

import sys
from typing import Any

from keras_psplus.cluster.process.signals import EXITS, UNCAUGHT
from keras_psplus.keras_hooks.hook import Hook
from keras_psplus.tf_internals import context, distributed_values, func_graph, resource_variable_ops


def _if_watched(_: Any) -> object | None:
    return EXITS if EXITS.is_watching else None


def _of_uncaught(_: Any) -> object:
    return UNCAUGHT


def _of_rows(variable: Any) -> Any:
    return vars(variable).get("_row_reads")


HOOKS = (
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
