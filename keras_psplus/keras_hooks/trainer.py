"""The trainer: `compile`, `fit`, `evaluate`, `predict` and the functions that take steps."""

from typing import Any

from keras_psplus.core.models import live
from keras_psplus.engine import Call
from keras_psplus.keras_hooks.hook import Hook, engine_of, of_loading, of_model
from keras_psplus.keras_internals.keras_parts import (
    BaseTrainer,
    TensorFlowTrainer,
    legacy_h5_format,
    tf_trainer,
)


def end_of_steps(call: Call) -> Any:
    """`Engine.on("steps_end")`, or `"test_steps_end"`: Keras asks in `fit` and in `evaluate`."""
    call.name = "test_steps_end" if call.engine.evaluates else "steps_end"
    return call.engine.on(call)


HOOKS = (
    Hook(
        BaseTrainer,
        "compile",
        ["self", "optimizer", "loss"],
        of_model,
        "run",
        "what cannot work is refused, and an optimizer given by name is made in the scope",
    ),
    Hook(
        BaseTrainer,
        "compile_from_config",
        ["self", "config"],
        of_loading,
        live.load,
        "a model that is loaded from a file outside the scope need not be trained",
    ),
    Hook(
        legacy_h5_format,
        "load_model_from_hdf5",
        ["filepath"],
        of_loading,
        live.load,
        "a model that is loaded from a file outside the scope need not be trained",
    ),
    Hook(
        TensorFlowTrainer,
        "_maybe_symbolic_build",
        ["self", "iterator", "data_batch"],
        of_model,
        "build",
        "variables are made in the scope, and no batch is drawn to see its shapes",
    ),
    Hook(
        TensorFlowTrainer,
        "_make_function",
        ["self", "step_function"],
        of_model,
        "make_step",
        "a step runs on all replicas and makes metrics global, or is sent to a worker",
        call="make_function",
    ),
    Hook(
        TensorFlowTrainer,
        "make_predict_function",
        ["self", "force"],
        of_model,
        "make_step",
        "outputs are those of a replica's own rows, in the order of the data",
    ),
    *(
        Hook(
            TensorFlowTrainer,
            name,
            ["self", "x", "y"],
            of_model,
            "run",
            "errors of lost tasks are translated; steps under way are waited for",
        )
        for name in ("fit", "train_on_batch")
    ),
    *(
        Hook(
            TensorFlowTrainer,
            name,
            ["self", "x"],
            of_model,
            "run",
            "updates of workers that step alone are settled; errors are translated",
        )
        for name in ("evaluate", "test_on_batch")
    ),
    *(
        Hook(
            TensorFlowTrainer,
            name,
            ["self", "x"],
            of_model,
            "run",
            "updates of workers that step alone are settled; results keep the data's order",
        )
        for name in ("predict", "predict_on_batch")
    ),
    Hook(
        BaseTrainer,
        "_get_metrics_result_or_logs",
        ["self", "logs"],
        of_model,
        end_of_steps,
        "the end of an epoch's steps: workers agree on weights before validation and callbacks",
    ),
    Hook(
        tf_trainer,
        "reduce_per_replica",
        ["values", "strategy", "reduction"],
        engine_of,
        "collective",
        "steps have made logs equal already; outputs are gathered in rank order",
        call="reduce_outputs",
        by=1,
    ),
)
