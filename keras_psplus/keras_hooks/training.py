"""Hooks of training: its loop, data, callbacks, layers, losses and optimizers."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core import data_position, gradient_path, live
from keras_psplus.core.batch import losses
from keras_psplus.engine import Call, engine_of
from keras_psplus.keras_hooks.hook import (
    Hook,
    of_applied,
    of_callback,
    of_handed_over,
    of_holder,
    of_layer_call,
    of_loading,
    of_model,
    of_optimizer,
    of_scope,
    of_step,
    of_tape,
    of_variables,
)
from keras_psplus.keras_internals.keras_parts import (
    BaseTrainer,
    TensorFlowTrainer,
    backup_and_restore,
    base_optimizer,
    callback_list,
    epoch_iterator,
    layers,
    legacy_h5_format,
    loss_module,
    loss_scale_optimizer,
    metrics,
    model_checkpoint,
    nn_module,
    numpy_module,
    progbar_logger,
    reduction_metrics,
    tf_optimizer,
    tf_trainer,
)
from keras_psplus.tf_internals import distribute_lib

# The trainer: `compile`, `fit`, `evaluate`, `predict` and the functions that take steps.


def end_of_steps(call: Call) -> Any:
    """`Engine.on("steps_end")`, or `"test_steps_end"`: Keras asks in `fit` and in `evaluate`."""
    call.name = "test_steps_end" if call.engine.evaluates else "steps_end"
    return call.engine.on(call)


TRAINER = (
    Hook(
        BaseTrainer,
        "compile(self, optimizer, loss)",
        of_model,
        "run",
        "what cannot work is refused, and an optimizer given by name is made in the scope",
    ),
    Hook(
        BaseTrainer,
        "compile_from_config(self, config)",
        of_loading,
        live.load,
        "a model that is loaded from a file outside the scope need not be trained",
    ),
    Hook(
        legacy_h5_format,
        "load_model_from_hdf5(filepath)",
        of_loading,
        live.load,
        "a model that is loaded from a file outside the scope need not be trained",
    ),
    Hook(
        TensorFlowTrainer,
        "_maybe_symbolic_build(self, iterator, data_batch)",
        of_model,
        "build",
        "variables are made in the scope, and no batch is drawn to see its shapes",
    ),
    Hook(
        TensorFlowTrainer,
        "_make_function(self, step_function)",
        of_model,
        "make_step",
        "a step runs on all replicas and makes metrics global, or is sent to a worker",
        call="make_function",
    ),
    Hook(
        TensorFlowTrainer,
        "make_predict_function(self, force)",
        of_model,
        "make_step",
        "outputs are those of a replica's own rows, in the order of the data",
    ),
    *(
        Hook(
            TensorFlowTrainer,
            f"{name}(self, x, y)",
            of_model,
            "run",
            "errors of lost tasks are translated; steps under way are waited for",
        )
        for name in ("fit", "train_on_batch")
    ),
    *(
        Hook(
            TensorFlowTrainer,
            f"{name}(self, x)",
            of_model,
            "run",
            "updates of workers that step alone are settled; errors are translated",
        )
        for name in ("evaluate", "test_on_batch")
    ),
    *(
        Hook(
            TensorFlowTrainer,
            f"{name}(self, x)",
            of_model,
            "run",
            "updates of workers that step alone are settled; results keep the data's order",
        )
        for name in ("predict", "predict_on_batch")
    ),
    Hook(
        BaseTrainer,
        "_get_metrics_result_or_logs(self, logs)",
        of_model,
        end_of_steps,
        "the end of an epoch's steps: workers agree on weights before validation and callbacks",
    ),
    Hook(
        tf_trainer,
        "reduce_per_replica(values, strategy, reduction)",
        engine_of,
        "collective",
        "steps have made logs equal already; outputs are gathered in rank order",
        call="reduce_outputs",
        by=1,
    ),
)


# Data: the iterator over epochs, and how many steps an epoch has.

DATA = (
    Hook(
        tf_trainer.TFEpochIterator,
        "__init__(self, distribute_strategy)",
        engine_of,
        "data",
        "each process reads its part of the global batches, or steps take them with them",
        call="make_iterator",
        by=1,
    ),
    Hook(
        tf_trainer.TFEpochIterator,
        "tf_sync(self)",
        of_holder,
        "data",
        "steps that were sent to workers are waited for",
        call="drain",
    ),
    Hook(
        epoch_iterator.EpochIterator,
        "__iter__(self)",
        of_holder,
        data_position.begin_epochs,
        "training goes on after the batch of a backup",
    ),
    Hook(
        epoch_iterator.EpochIterator,
        "_enumerate_iterator(self)",
        of_holder,
        data_position.enumerate_steps,
        "an epoch has as many steps as its data, not as the first epoch's",
    ),
    Hook(
        epoch_iterator.EpochIterator,
        "_interrupted_warning(self)",
        of_holder,
        data_position.warn_of_early_end,
        "data of unknown length end like that, without a warning",
    ),
)


# Callbacks: the chief alone writes, all workers stop together, and backups are of all workers.

_BACKUP = backup_and_restore.BackupAndRestore
_LIST = callback_list.CallbackList

CALLBACKS = (
    Hook(
        _LIST,
        "set_model(self, model)",
        of_model,
        "on",
        "callbacks that only write are left out on workers that are not the chief",
        call="set_model",
        by=1,
    ),
    Hook(
        _LIST,
        "on_train_begin(self, logs)",
        of_callback,
        "on",
        "a job resumes from its last backup",
        call="train_begin",
    ),
    Hook(
        _LIST,
        "on_epoch_begin(self, epoch, logs)",
        of_callback,
        "on",
        "a job resumes in the middle of an epoch",
        call="epoch_begin",
    ),
    Hook(
        _LIST,
        "on_train_batch_end(self, batch, logs)",
        of_callback,
        "on",
        "a process that is told to end saves the job; TerminateOnNaN hears of late losses",
        call="batch_end",
    ),
    Hook(
        _LIST,
        "on_epoch_end(self, epoch, logs)",
        of_callback,
        "on",
        "all workers stop if one does",
        call="epoch_end",
    ),
    Hook(
        progbar_logger.ProgbarLogger,
        "on_epoch_end(self, epoch, logs)",
        of_callback,
        data_position.end_progress,
        "the next epoch may have another number of steps",
    ),
    Hook(
        model_checkpoint.ModelCheckpoint,
        "_save_model(self, epoch, batch, logs)",
        of_callback,
        "on",
        "the chief alone writes, once all workers have the same weights",
        call="checkpoint",
    ),
    Hook(
        _BACKUP,
        "_save_model(self)",
        of_callback,
        "on",
        "what each worker keeps is saved as well, and a kill leaves a whole state",
        call="backup",
    ),
    Hook(
        _BACKUP,
        "on_train_begin(self, logs)",
        of_callback,
        "on",
        "all workers resume where the chief's files say, and none from damaged ones",
        call="restore",
    ),
    Hook(
        _BACKUP,
        "on_train_end(self, logs)",
        of_callback,
        "on",
        "the chief alone deletes what all workers share",
        call="end_backup",
    ),
    *(
        Hook(
            keras.callbacks.SwapEMAWeights,
            f"{name}(self, optimizer)",
            of_callback,
            "write",
            "workers that share weights wait for each other once, and not for each of them",
            call="change_averages",
        )
        for name in ("_tf_swap_variables", "_tf_finalize_ema_values")
    ),
)


# Layers: their weights, and what they and users' steps ask of all replicas.

LAYERS: tuple[Hook, ...] = (
    Hook(
        layers.Layer,
        "__init__(self)",
        of_scope,
        "layer",
        "a layer belongs to the pipeline stage in whose context it is made",
        call="make_layer",
    ),
    Hook(
        layers.Layer,
        "__call__(self)",
        of_layer_call,
        "layer",
        "a layer runs on its stage; Keras 3.13 sums activity regularisers over rows",
        call="call_layer",
    ),
    Hook(
        keras.Function,
        "_run_through_graph(self, inputs, operation_fn)",
        of_layer_call,
        "layer",
        "XLA compiles the parts of a functional model that it can, stage by stage in a pipeline",
        call="run_graph",
    ),
    Hook(
        layers.Layer,
        "add_weight(self)",
        of_scope,
        "make_variable",
        "the servers of a table apply its regulariser and constraint, to the rows of a step",
    ),
    Hook(
        layers.Layer,
        "set_weights(self, weights)",
        of_holder,
        "write",
        "workers that share weights wait for each other once, and not for each of them",
    ),
    Hook(
        layers.BatchNormalization,
        "_moments(self, inputs, mask)",
        of_step,
        losses.moments,
        "synchronised statistics are of all replicas also where there is a mask",
    ),
    Hook(
        distribute_lib.ReplicaContextBase,
        "all_reduce(self, reduce_op, value)",
        of_step,
        "collective",
        "a replica without rows computes with one that does not count",
    ),
    Hook(
        distribute_lib.ReplicaContext,
        "all_gather(self, value, axis)",
        of_step,
        "collective",
        "a replica without rows computes with one that does not count",
    ),
)


# Losses: the gradient of a replica's mean counts by its rows.
#
# Stock Keras divides every loss by the number of replicas and sums gradients. That is right for
# equal shares only, leaves users' own losses in `train_step` too large by that number, and shows
# them in logs too small. Here losses stay what they are in one process, means over the replica's
# own rows, and the tape takes their gradients times `local_rows / global_rows`: the sum over
# replicas is then the gradient of the mean over the global batch.

_OF_LOGITS = "(target, output, from_logits, axis)"

LOSSES = (
    *(
        Hook(
            loss_module,
            f"{name}(value)",
            of_step,
            losses.scale,
            "a loss is not divided by the number of replicas: its gradient is scaled by rows",
        )
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    ),
    Hook(
        loss_module,
        "reduce_values(values, sample_weight, reduction)",
        of_step,
        losses.reduce_values,
        "sums are no means, and weighted means divide by the whole batch's weight",
    ),
    Hook(
        loss_module,
        "apply_mask(sample_weight, mask, dtype, reduction)",
        of_step,
        losses.apply_mask,
        "masked means divide by the whole batch's number of entries",
    ),
    *(
        Hook(
            module,
            function,
            of_step,
            "layer",
            "workers have parts of the logits of a cut layer, and exchange a few numbers of a row",
        )
        for module, function in (
            (nn_module, f"sparse_categorical_crossentropy{_OF_LOGITS}"),
            (nn_module, f"categorical_crossentropy{_OF_LOGITS}"),
            (numpy_module, "argmax(x, axis, keepdims)"),
        )
    ),
    Hook(
        reduction_metrics.Mean,
        "update_state(self, values, sample_weight)",
        of_step,
        losses.update_mean,
        "a mean over a replica's rows counts by its rows",
    ),
    Hook(
        reduction_metrics.Sum,
        "update_state(self, values, sample_weight)",
        of_step,
        losses.update_sum,
        "a loss of the batch is added once, not once by each replica",
    ),
    Hook(
        metrics.Metric,
        "__getattribute__(self, name)",
        of_step,
        losses.get_attribute,
        "in any metric's `update_state`, losses are numbers of the replica's own rows",
    ),
    Hook(
        tf.GradientTape,
        "gradient(self, target, sources, output_gradients, unconnected_gradients)",
        of_tape,
        "gradient",
        "the gradient of a replica's mean counts by its rows",
    ),
)


# Optimizers: gradients are summed before they are clipped, and updates run beside variables.
#
# Stock Keras clips each replica's own gradients and sums them afterwards, which no single process
# would do. The order is written down in `core/gradient_path.py`.

_BASE = base_optimizer.BaseOptimizer
_TF = tf_optimizer.TFOptimizer
_LOSS_SCALE = loss_scale_optimizer.LossScaleOptimizer
_APPLY: list[tuple[Any, Callable[[Any], Any]]] = [(_BASE, of_applied), (_LOSS_SCALE, of_applied)]
if hasattr(keras.optimizers, "MultiOptimizer"):
    # Handed over whole, it counts a step once. Not in all versions of Keras.
    _APPLY.append((keras.optimizers.MultiOptimizer, of_handed_over))

OPTIMIZER = (
    Hook(
        _BASE,
        "build(self, variables)",
        of_optimizer,
        gradient_path.build_optimizer,
        "the servers of a table learn which optimizer updates it",
        call="build_optimizer",
    ),
    Hook(
        _BASE,
        "exclude_from_weight_decay(self, var_list, var_names)",
        of_variables,
        "read",
        "it keeps the keys of variables, which those of a stage have once they are made",
        by=1,
    ),
    Hook(
        _TF,
        "add_variable_from_reference(self, reference_variable, name, initializer)",
        of_optimizer,
        gradient_path.add_slot,
        "the slots of a table are on its servers, and those of a dynamic one grow with it",
        call="add_slot",
    ),
    *(
        Hook(
            owner,
            "apply(self, grads, trainable_variables)",
            find,
            "apply",
            "`updates=` says when to step; synchronous workers hand their gradients over",
        )
        for owner, find in _APPLY
    ),
    Hook(
        _TF,
        "_overwrite_model_variables_with_average_value(self, trainable_variables)",
        of_optimizer,
        "write",
        "workers that share weights wait for each other once, and not for each of them",
        call="change_averages",
    ),
    Hook(
        _LOSS_SCALE,
        "check_finite(self, grads)",
        of_optimizer,
        gradient_path.check_finite,
        "one replica's overflow must skip the step on all",
    ),
    Hook(
        _BASE,
        "_backend_apply_gradients(self, grads, trainable_variables)",
        of_optimizer,
        gradient_path.apply_gradients,
        "gradients are reduced before they are clipped; updates run beside their variables",
    ),
    Hook(
        _TF,
        "_backend_update_step(self, grads, trainable_variables, learning_rate)",
        of_optimizer,
        gradient_path.update_variables,
        "gradients are reduced already; those of variables on servers are pushed there",
    ),
)
