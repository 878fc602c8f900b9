"""The way of a gradient, from an optimizer's `apply` to its variables.

    apply            Engine.apply: `updates=` may keep gradients, or workers hand them over
      unscale        Keras, by the loss scale
      check finite   Engine.collective, for a dynamic loss scale: on all replicas alike
      accumulate     Engine.accumulate, with `gradient_accumulation_steps`
        reduce       Engine.reduce: the gradients of the global batch, of those of each replica
        clip         Engine.clip
        decay        Engine.decay
        update       Engine.update, and what an optimizer does before its variables' updates
          push       Engine.push: gradients of variables on servers go there
      average        Engine.average: moving averages of weights
      constrain      Keras, or Engine.apply beside the variables

Stock Keras reduces in the middle of `update`, so that each replica clips its own gradients, which
no single process would do. Inside `accumulate`, all of an update is in the branch that is taken
every so many batches, so that nothing is sent in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.base.optimizers import is_wrapper
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.keras_internals.keras_parts import Variable, ops
from keras_psplus.tables import local, row_variable
from keras_psplus.updates.base import numbers_of

if TYPE_CHECKING:
    import keras

    from keras_psplus.engine import Call, Engine

_merge_call = tf.__internal__.distribute.interim.maybe_merge_call


def apply_gradients(call: Call) -> None:
    """Applies the unscaled gradients of one batch: Keras's `_backend_apply_gradients`.

    Args:
        call: The call, of an optimizer that is built, and no loss scale around one.
    """
    engine, optimizer = call.engine, call.owner
    grads, trainable_variables = call.get("grads"), call.get("trainable_variables")
    if not engine.is_distributed or not tf.distribute.get_replica_context():
        if local.in_memory(trainable_variables):
            update(engine, optimizer, list(grads), list(trainable_variables))
        else:
            call.proceed()
        return
    if optimizer.gradient_accumulation_steps:
        engine.accumulate(optimizer, grads, trainable_variables)
    else:
        update(engine, optimizer, grads, trainable_variables)
    if optimizer.use_ema:
        _average(engine, optimizer)


def update(
    engine: Engine,
    optimizer: keras.optimizers.Optimizer,
    grads: list[tf.Tensor | tf.IndexedSlices],
    variables: list[keras.Variable],
) -> None:
    """One update: everything between a batch's gradients and the variables that they change."""
    grads = engine.reduce(optimizer, grads, variables)
    tables = [i for i, v in enumerate(variables) if local.in_memory([v])]
    slices = {i: _by_part(duplicate_rows.summed, grads[i]) for i in tables}
    # Of a whole table there are not even zeros, which Keras would clip, and decay by itself.
    values = {i: _by_part(lambda part: part.values, slices[i]) for i in tables}
    grads = engine.clip(optimizer, [values.get(i, g) for i, g in enumerate(grads)], variables)
    for i in tables:
        grads[i] = _by_part(_with_values, slices[i], grads[i])
    engine.decay(optimizer, [v for i, v in enumerate(variables) if i not in slices])
    engine.update(optimizer, grads, variables)


def _by_part(function: Callable[..., Any], gradient: Any, *others: Any) -> Any:
    """Applies a function to a gradient, or where they are to its parts on servers."""
    if not isinstance(gradient, tuple):
        return function(gradient, *others)
    results = []
    for part, *of_others in zip(gradient, *others):
        with tf.device(part.device):
            results.append(function(part, *of_others))
    return type(gradient)(results)


def _with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def update_variables(call: Call) -> None:
    """Takes the place of Keras's `_backend_update_step`, which sums over replicas at its start."""
    optimizer, grads = call.owner, call.get("grads")
    trainable_variables = call.get("trainable_variables")
    sends = call.engine.is_distributed and tf.distribute.get_replica_context()
    if not sends:
        rate = call.get("learning_rate")
        grads, trainable_variables = local.update(optimizer, grads, trainable_variables, rate)
    if not call.engine.is_distributed:
        if trainable_variables:
            call.proceed(grads=grads, trainable_variables=trainable_variables)
        return
    values = [v.value if isinstance(v, Variable) else v for v in trainable_variables]
    pairs = list(zip(grads, values))
    if sends:
        pairs = call.engine.push(optimizer, grads, values)
    _merge_call(
        optimizer._distributed_tf_update_step,
        optimizer._distribution_strategy,
        pairs,
        call.get("learning_rate"),
    )


def check_finite(call: Call) -> tf.Tensor:
    """Whether gradients are finite, of rows too, of which Keras would make whole tables."""
    return call.engine.collective(call.changed(grads=numbers_of(call.get("grads"))))


def build_optimizer(call: Call) -> None:
    """Builds an optimizer, of which tables in memory make slots."""
    call.engine.make_variable(call)
    if not is_wrapper(call.owner):
        local.build(call.owner, call.get("variables"))


def add_slot(call: Call) -> keras.Variable:
    """Makes a variable of an optimizer: of a dynamic table, one that grows with it."""
    reference = call.get("reference_variable")
    if row_variable.is_keyed(reference):
        return row_variable.add_slot(call.owner, reference, call.get("name"))
    return call.engine.make_variable(call)


def accumulate(
    engine: Engine,
    optimizer: keras.optimizers.Optimizer,
    grads: list[tf.Tensor | tf.IndexedSlices],
    variables: list[keras.Variable],
) -> None:
    """Adds gradients up beside their variables; updates by their mean every so many batches."""
    steps = optimizer.gradient_accumulation_steps
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables]

    def update_by_mean() -> None:
        means = [(grad + total) / steps for grad, total in zip(grads, sums)]
        update(engine, optimizer, means, variables)
        optimizer._backend_reset_gradient_accumulators()

    ops.cond(
        (optimizer._iterations + 1) % steps == 0,
        update_by_mean,
        lambda: optimizer._backend_increment_gradient_accumulators(grads, sums),
    )


def _average(engine: Engine, optimizer: keras.optimizers.Optimizer) -> None:
    variables = optimizer._trainable_variables
    engine.average(optimizer, variables)
    if optimizer.ema_overwrite_frequency:
        ops.cond(
            (optimizer.iterations + 1) % optimizer.ema_overwrite_frequency == 0,
            lambda: optimizer._overwrite_model_variables_with_average_value(variables),
            lambda: None,
        )
