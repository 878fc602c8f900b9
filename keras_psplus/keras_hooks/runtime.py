"""TensorFlow's runtime and Python: variables, parameter servers' coordinator, a process's end.

Where a strategy answers for single objects only, the object has the answer in an attribute. The
last entries are not replaced as a whole: a module changes them for objects of its own.
"""

import sys
from collections.abc import Callable
from typing import Any

from keras_psplus import tracebacks
from keras_psplus.cluster.process.exit_code import EXITS
from keras_psplus.keras_hooks.hook import Hook
from keras_psplus.tf_internals import (
    cluster_coordinator,
    context,
    distributed_values,
    func_graph,
    resource_variable_ops,
)

_WORKER = cluster_coordinator.Worker
_HANDLER = cluster_coordinator.WorkerPreemptionHandler


def _if_watched(_: Any) -> object | None:
    return EXITS if EXITS.is_watching else None


def _of_uncaught(_: Any) -> object:
    return tracebacks.UNCAUGHT


def _in(attribute: str) -> Callable[[Any], object | None]:
    """Finder of the answer that an object has in an attribute."""
    return lambda owner: vars(owner).get(attribute)


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
        "peers hear of an error that ends the script; frames of libraries are left out",
    ),
    *(
        Hook(
            distributed_values.DistributedVariable,
            name,
            ["self", "indices", "name"],
            _in("_row_reads"),
            name,
            "TensorFlow reads a mirrored variable as a whole to look up rows",
        )
        for name in ("sparse_read", "gather_nd")
    ),
    Hook(
        _WORKER,
        "_process_closure",
        ["self", "closure"],
        _in("_lanes"),
        "process",
        "with `overlap_steps`, a worker begins with a step before it is done with the one before",
    ),
    *(
        Hook(
            _WORKER,
            name,
            ["self"],
            _in("_clocks"),
            ask,
            "steps are given to the workers that are there, and none waits for a lost one",
        )
        for name, ask in (("_on_closure_failure", "lost"), ("_on_worker_recovery", "recovered"))
    ),
    Hook(
        _HANDLER,
        "stop",
        ["self"],
        _in("_end"),
        "leave",
        "TensorFlow asks for a lock that is held for as long as a lost worker is waited for",
    ),
    Hook(
        _HANDLER,
        "_preemption_handler",
        ["self"],
        None,
        "parameter_server.scheduling.recovery",
        "the thread is ended, and one of its own takes lost workers back between steps",
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
