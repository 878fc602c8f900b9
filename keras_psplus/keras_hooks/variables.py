"""Replaced functions of variables, layers, saving and TensorFlow, and those of keras_rs."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.cluster.process.signals import EXITS, UNCAUGHT
from keras_psplus.core import models
from keras_psplus.core.base.checks import KerasRSPlacement
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
    nn_module,
    numpy_module,
    saving_lib,
    seed_generator,
)
from keras_psplus.layers.dynamic_embedding import DynamicEmbedding, FeatureLookup
from keras_psplus.log import logger
from keras_psplus.serving import export_archive, export_model
from keras_psplus.tf_internals import context, distributed_values, func_graph, resource_variable_ops

# KerasRS's `DistributedEmbedding`: its tables say where they want to lie, or are dynamic ones.
#
# Outside of TPUs each of them is a `keras_rs.layers.EmbedReduce`, a `keras.layers.Embedding` whose
# rows are summed afterwards. Reference: https://keras.io/keras_rs/api/embedding_layers/


class KerasRSTables(KerasRSPlacement):
    """Tables of features that are dynamic ones, beside those of a fixed size.

    A `DynamicEmbedding` in the place of a table becomes the initializer of one: KerasRS writes it
    to a model's configuration so, and makes it again.
    """

    def take_in(self, call: Call) -> None:
        for config in keras.tree.flatten(call.get("feature_configs")):
            if isinstance(config.table, DynamicEmbedding):
                config.table = self._config_of(config.table)
        super().take_in(call)

    def make_layers(self, call: Call) -> None:
        configs, dynamic = dict(call.get("feature_configs")), {}
        for path, config in call.get("feature_configs").items():
            if isinstance(config.table.initializer, DynamicEmbedding):
                dynamic[path] = configs.pop(path).table.initializer
        super().make_layers(call.changed(feature_configs=configs))
        layers = {id(table): FeatureLookup(table) for table in dynamic.values()}
        for path, table in dynamic.items():
            call.owner._default_device_embedding_layers[path] = layers[id(table)]

    def _config_of(self, table: DynamicEmbedding) -> Any:
        if table.combiner is None:
            raise ValueError(
                "KerasRS combines the rows of each example, by the `combiner` of the table. Give "
                'it to the DynamicEmbedding, as DynamicEmbedding(32, combiner="mean"). '
                f"Received: combiner=None of the table '{table.name}'"
            )
        # Features that share a table share its configuration.
        if table.keras_rs_config is None:
            make = importlib.import_module("keras_rs").layers.TableConfig
            # Of no fixed number of rows.
            table.keras_rs_config = make(table.name, 0, table.dim, table, placement=_HERE)
        return table.keras_rs_config


_HERE = "default_device"
_wishes = KerasRSTables()
_misfits: list[Exception] = []


def _of_any(_: Any) -> KerasRSTables:
    # Also before there is a strategy: the scope in which the layer is built decides.
    return _wishes


def hooks() -> tuple[Hook, ...]:
    """The hooks into KerasRS, if it is there; else none."""
    if importlib.util.find_spec("keras_rs") is None:
        return ()
    try:
        layer = importlib.import_module("keras_rs").layers.DistributedEmbedding
    except (ImportError, AttributeError) as error:
        _misfits.append(error)
        return ()
    found = (
        Hook(
            layer,
            "_init_feature_configs_structures(self, feature_configs)",
            _of_any,
            "take_in",
            "KerasRS refuses the placement `parameter_server`",
        ),
        Hook(
            layer,
            "_default_device_init(self, feature_configs)",
            _of_any,
            "make_layers",
            "the embedding of a table learns where the table wants to lie",
        ),
    )
    try:
        for hook in found:
            hook.check_signature()
    except ImportError as error:
        _misfits.append(error)
        return ()
    return found


def warn_of_misfit() -> None:
    """Warns of a KerasRS that has other functions, and is left as it is."""
    for error in _misfits:
        logger.warning("keras_psplus does not fit this version of KerasRS: %s", error)


# Hooks of variables, of saving, and of TensorFlow's and Python's runtime.

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
        "__init__(self, initializer, shape)",
        of_scope,
        "make_variable",
        "what is read, changed or looked up later is asked of the strategy that made it",
        call="make_variable",
    ),
    Hook(
        Variable,
        "_initialize(self, value)",
        of_scope,
        "make_variable",
        "totals and means are made global once a step; variables get their place",
        call="initialize",
    ),
    Hook(
        Variable,
        "_initialize_with_initializer(self, initializer)",
        of_scope,
        "make_variable",
        "the rows of a table are drawn by the servers that have them",
        call="initialize_with_initializer",
    ),
    Hook(
        Variable,
        "_direct_assign(self, value)",
        of_variable,
        "write",
        "what a replica changes by itself is made global; steps under way come before",
        call="assign",
    ),
    Hook(Variable, "numpy(self)", of_variable, "read", "steps under way come before"),
    Hook(
        Variable,
        "assign_add(self, value)",
        of_variable,
        "write",
        "Keras reads, adds and writes: another worker's update in between would be lost",
    ),
    Hook(
        Variable,
        "assign_sub(self, value)",
        of_variable,
        "write",
        "Keras reads, subtracts and writes: another worker's update in between would be lost",
    ),
    Hook(
        Variable,
        "__float__(self)",
        of_variable,
        to_float,
        "TensorFlow's mirrored variables lack what callbacks do with a learning rate",
    ),
    Hook(
        Variable,
        "__int__(self)",
        of_variable,
        to_int,
        "TensorFlow's mirrored variables lack what callbacks do with a counter",
    ),
    Hook(
        Variable,
        "sparse_read(self, indices, name)",
        of_variable,
        "read",
        "tf.gather asks for it: without it, each lookup reads the whole value",
        is_added=True,
    ),
    Hook(
        numpy_module,
        "take(x, indices, axis)",
        _of_taken,
        "read",
        "Keras reads the whole value for its shape",
    ),
    Hook(
        nn_module,
        "conv(inputs, kernel)",
        _of_taken,
        "read",
        "XLA, by which Keras convolves in groups on a CPU, reads no variable of a server",
        by=1,
    ),
    Hook(
        seed_generator.SeedGenerator,
        "next(self, ordered)",
        of_step,
        "layer",
        "replicas draw different numbers from one state",
        call="next_seed",
    ),
)


# Saving: files and folders appear whole, and the paths that are shown are the script's.


def _of_writing(_: Any) -> object | None:
    return models.SHOWN if models.SHOWN.is_writing else None


SAVING = (
    *(
        Hook(
            model_module.Model,
            f"{name}(self, filepath, overwrite)",
            of_holder,
            "save",
            "files appear whole, whichever workers write them",
        )
        for name in ("save", "save_weights")
    ),
    Hook(
        model_module.Model,
        "export(self, filepath, format)",
        of_exported,
        export_model,
        "folders appear whole; variables of parameter servers are copied to the chief; so are "
        "dynamic tables, which are part of the graph then",
    ),
    Hook(
        ExportArchive,
        "write_out(self, filepath)",
        of_archive,
        export_archive,
        "as `export`: what is exported is traced then",
        call="export",
    ),
    Hook(
        saving_lib,
        "get_attr_skipset(obj_type)",
        of_scope,
        models.attributes_to_skip,
        "Keras makes an optimizer to see its attributes, which must not be in the scope",
    ),
    Hook(
        saving_lib,
        "is_memory_sufficient(model)",
        of_holder,
        "save",
        "Keras has a whole model in memory before it is in a file, if this machine has room for it",
        call="has_memory_for_file",
    ),
    Hook(
        io_utils,
        "print_msg(message)",
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
        "exit(status)",
        _if_watched,
        "note",
        "servers learn whether the script has ended well, which functions of atexit are not told",
    ),
    Hook(
        sys,
        "excepthook()",
        _of_uncaught,
        "show",
        "peers hear of an error that ends the script",
    ),
    *(
        Hook(
            distributed_values.DistributedVariable,
            f"{name}(self, indices, name)",
            _of_rows,
            name,
            "TensorFlow reads a mirrored variable as a whole to look up rows",
        )
        for name in ("sparse_read", "gather_nd")
    ),
    Hook(
        resource_variable_ops.ResourceVariable,
        "_read_variable_op(self)",
        None,
        "parameter_server.extended",
        "a variable on a server is given a class whose reads a worker's function shares",
    ),
    Hook(
        func_graph,
        "func_graph_from_py_func(name, python_func)",
        None,
        "tf_internals.trace_end",
        "operations are added at the end of a trace, by the list that its outputs go to",
    ),
    Hook(
        context.Context,
        "ensure_initialized(self)",
        None,
        "cluster.process.early_init",
        "the call that starts the runtime too early is named; from the import to that call",
    ),
    *(
        Hook(
            strategy,
            "__init__(self)",
            None,
            "cluster.process.stock_strategies",
            "Keras 3 does not train under it in several processes, and does not say so",
        )
        for strategy in (
            tf.distribute.MultiWorkerMirroredStrategy,
            tf.distribute.ParameterServerStrategy,
            tf.distribute.MirroredStrategy,
        )
    ),
)
