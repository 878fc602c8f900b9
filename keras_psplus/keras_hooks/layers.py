"""Layers: their weights, and what they and users' steps ask of all replicas."""

import keras

from keras_psplus.core.batch import losses
from keras_psplus.keras_hooks.hook import Hook, of_holder, of_layer_call, of_scope, of_step
from keras_psplus.keras_internals.keras_parts import layers
from keras_psplus.tf_internals import distribute_lib

HOOKS: tuple[Hook, ...] = (
    Hook(
        layers.Layer,
        "__init__",
        ["self"],
        of_scope,
        "layer",
        "a layer belongs to the pipeline stage in whose context it is made",
        call="make_layer",
    ),
    Hook(
        layers.Layer,
        "__call__",
        ["self"],
        of_layer_call,
        "layer",
        "a layer runs on its stage; Keras 3.13 sums activity regularisers over rows",
        call="call_layer",
    ),
    Hook(
        keras.Function,
        "_run_through_graph",
        ["self", "inputs", "operation_fn"],
        of_layer_call,
        "layer",
        "XLA compiles the parts of a functional model that it can, stage by stage in a pipeline",
        call="run_graph",
    ),
    Hook(
        layers.Layer,
        "add_weight",
        ["self"],
        of_scope,
        "make_variable",
        "the servers of a table apply its regulariser and constraint, to the rows of a step",
    ),
    Hook(
        layers.Layer,
        "set_weights",
        ["self", "weights"],
        of_holder,
        "write",
        "workers that share weights wait for each other once, and not for each of them",
    ),
    Hook(
        layers.BatchNormalization,
        "_moments",
        ["self", "inputs", "mask"],
        of_step,
        losses.moments,
        "synchronised statistics are of all replicas also where there is a mask",
    ),
    Hook(
        distribute_lib.ReplicaContextBase,
        "all_reduce",
        ["self", "reduce_op", "value"],
        of_step,
        "collective",
        "a replica without rows computes with one that does not count",
    ),
    Hook(
        distribute_lib.ReplicaContext,
        "all_gather",
        ["self", "value", "axis"],
        of_step,
        "collective",
        "a replica without rows computes with one that does not count",
    ),
)
