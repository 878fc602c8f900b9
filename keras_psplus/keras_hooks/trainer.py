"""The trainer: what `fit`, `evaluate` and `predict` run on each replica, and what they return."""

import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import core, trainer
from keras.src.trainers import trainer as base_trainer

from keras_psplus.all_reduce import batches, failure
from keras_psplus.all_reduce.padding import LastRow
from keras_psplus.hybrid import prefetch
from keras_psplus.keras_hooks import (
    checks,
    data,
    hybrid_prefetch,
    iterator_release,
    outside_models,
    single_steps,
    updates,
)
from keras_psplus.keras_hooks.ownership import distributing, our_step, ours
from keras_psplus.keras_hooks.patching import replace

_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


def install():
    """Installs this module's hooks."""
    tf_trainer = trainer.TensorFlowTrainer
    replace(base_trainer.Trainer, "compile", ["self", "optimizer", "loss"])(_compile)
    replace(tf_trainer, "_maybe_symbolic_build", ["self", "iterator", "data_batch"])(_build)
    replace(tf_trainer, "_make_function", ["self", "step_function"])(_make_function)
    replace(tf_trainer, "make_predict_function", ["self", "force"])(_make_predict_function)
    replace(trainer.TFEpochIterator, "__init__", ["self", "distribute_strategy"])(_init_iterator)
    replace(trainer, "reduce_per_replica", ["values", "strategy", "reduction"])(_reduce)
    for name in ("fit", "train_on_batch"):
        replace(tf_trainer, name, ["self", "x", "y"])(_training(name))
    for name in ("evaluate", "test_on_batch"):
        replace(tf_trainer, name, ["self", "x"])(_evaluating(outside_models.check, name))
    for name in ("predict", "predict_on_batch"):
        replace(tf_trainer, name, ["self", "x"])(_evaluating(outside_models.note_prediction, name))


def _explained(original, self, *args, **kwargs):
    strategy = ours(self._distribute_strategy)
    if strategy is None:
        return original(self, *args, **kwargs)
    with failure.explained(strategy.task):
        return original(self, *args, **kwargs)


def _evaluating(check, name):
    def evaluate(original, self, *args, **kwargs):
        check(self, name)

        def settled(*args, **kwargs):
            updates.settle(distributing(self._distribute_strategy), self)
            return original(*args, **kwargs)

        with updates.evaluating.raised():
            return _explained(settled, self, *args, **kwargs)

    return evaluate


def _training(name):
    def train(original, self, *args, **kwargs):
        outside_models.check(self, name)
        return _explained(original, self, *args, **kwargs)

    return train


def _compile(original, self, *args, **kwargs):
    strategy = distributing(getattr(self, "_distribute_strategy", None))
    if strategy is None:
        outside_models.check(self, "compile")
        return original(self, *args, **kwargs)
    checks.check_compile_arguments(strategy, original, (self, *args), kwargs)
    # An optimizer given by name makes its variables here: also when compile() is called outside.
    with strategy.scope():
        result = original(self, *args, **kwargs)
    if self.jit_compile:
        self.jit_compile = False
    return result


def _build(original, self, iterator=None, data_batch=None):
    strategy = distributing(self._distribute_strategy)
    if strategy is None:
        return original(self, iterator=iterator, data_batch=data_batch)
    if iterator is not None:
        # Keras would draw a batch to see its shapes; a generator's batch would be lost by that.
        data_batch = data.symbolic_batch(iterator.batch_spec)
    with strategy.scope():
        self._symbolic_build(data_batch=data_batch)
    checks.check_variables(strategy, self)
    if ours(strategy):
        updates.prepare(strategy, self)


def _init_iterator(original, self, distribute_strategy=None, *args, **kwargs):
    strategy = ours(distribute_strategy)
    if strategy is None:
        return original(self, distribute_strategy, *args, **kwargs)
    super(trainer.TFEpochIterator, self).__init__(*args, **kwargs)
    self._distribute_strategy = strategy
    distributed = data.distribute(
        strategy, self.data_adapter, hybrid_prefetch.is_wanted(), self.steps_per_epoch
    )
    self.data_adapter = distributed.adapter
    self._num_batches = self.data_adapter.num_batches
    self._distributed_dataset = iterator_release.Dataset(distributed.dataset)
    self.batch_spec = distributed.batch_spec


def _make_function(original, self, step_function):
    strategy = ours(self._distribute_strategy)
    if strategy is None:
        return original(self, step_function)
    function = original(self, _replica_step(self, step_function))
    of_iterator = function
    if not self.run_eagerly:
        of_iterator = single_steps.of_iterator(function, self.steps_per_execution)
    progress, is_training = strategy.progress, step_function == self.train_step
    doing = "training step" if is_training else "evaluation step"

    def function_of_iterator(iterator):
        is_iterator = isinstance(iterator, _ITERATORS)
        if not is_iterator:
            iterator = (data.split_eagerly(strategy, batch) for batch in iterator)
        progress.begin(doing)
        try:
            result = of_iterator(iterator) if is_iterator else function(iterator)
        finally:
            progress.end()
        if is_training:
            progress.count(self.steps_per_execution)
        return result

    return function_of_iterator


def _make_predict_function(original, self, force=False):
    strategy = ours(self._distribute_strategy)
    if strategy is None:
        original(self, force)
        return
    view = _WithPredictStep(self, _predict_step(self))
    original(view, force)
    function = view.predict_function
    if function is self.predict_function:
        return

    def function_of_batches(all_data):
        all_data = [b if _is_distributed(b) else data.split_eagerly(strategy, b) for b in all_data]
        strategy.progress.begin("prediction step")
        try:
            return function(all_data)
        finally:
            strategy.progress.end()

    self.predict_function = function_of_batches


class _WithPredictStep:
    """A model with another `predict_step`, as `make_predict_function` sees it."""

    def __init__(self, model, predict_step):
        self._model, self.predict_step = model, predict_step
        self.predict_function = model.predict_function

    def __getattr__(self, name):
        return getattr(self._model, name)


def _predict_step(model):
    """A predict step whose outputs are those of the replica's own rows."""
    last_row = LastRow()

    def predict_step(batch):
        step = our_step()
        if not step.has_share:
            batch = _padded(step, last_row, batch, step.set_rows)
        outputs = model.predict_step(batch)
        return tree.map_structure(
            lambda t: step.rows_if_any(t) if isinstance(t, tf.Tensor) and t.shape.rank else t,
            outputs,
        )

    return predict_step


def _padded(step, last_row, batch, note):
    """A replica's batch with at least one row, once it is noted how many it has."""
    rows = batches.rows_of(batch)
    if rows is None:
        return batch
    note(rows)
    padded = last_row.padded(batch, rows, step.rank)
    ahead = prefetch.current()
    if ahead is not None:
        ahead.note_padded(batch, padded)
    return padded


def _is_distributed(batch):
    return isinstance(batch, (batches.Shards, batches.Batch)) or any(
        isinstance(leaf, tf.distribute.DistributedValues) for leaf in tree.flatten(batch)
    )


def _replica_step(model, step_function):
    """A train or test step that leaves metrics, moving averages and logs equal everywhere."""
    # Kept over traces: a step that is itself a tf.function is traced once only.
    changed, touched, last_row = {}, set(), LastRow()

    def replica_step(batch):
        step = our_step()
        if not step.has_share:
            batch = _padded(step, last_row, batch, step.agree_on_share)
        states = [v._value for v in model.metrics_variables]
        step.note_baselines(states)
        logs = step_function(batch)
        changed.update({v.ref(): v for v in step.changed})
        touched.update(step.touched)
        metrics = [m for m in model.metrics if any(v._value.ref() in touched for v in m.variables)]
        own, rest = _own_logs(logs, metrics)
        averaged = step.synchronise(means=list(changed.values()), tensors=own)
        return _with_results(rest(averaged), metrics)

    return replica_step


def _own_logs(logs, metrics):
    """Finds the floats in the logs that are no metric's result: a replica's own, to be averaged.

    Returns:
        The list of these tensors, and a function that puts others in their place.
    """
    of_metrics = {name for metric in metrics for name in (metric.name, *_results(metric))}
    names = [n for n in logs if n not in of_metrics] if isinstance(logs, dict) else None
    part = logs if names is None else {n: logs[n] for n in names}
    leaves = [
        tf.convert_to_tensor(leaf) if isinstance(leaf, core.Variable) else leaf
        for leaf in tf.nest.flatten(part)
    ]
    places = [
        i
        for i, leaf in enumerate(leaves)
        if tf.is_tensor(leaf) and leaf.dtype.is_floating and leaf.shape.is_fully_defined()
    ]

    def with_averages(averages):
        for place, average in zip(places, averages):
            leaves[place] = average
        changed = tf.nest.pack_sequence_as(part, leaves)
        return changed if names is None else {**logs, **changed}

    return [leaves[i] for i in places], with_averages


def _with_results(logs, metrics):
    """The logs with the results of metrics as they are now, of all replicas."""
    if not isinstance(logs, dict):
        return logs
    for metric in metrics:
        if metric.name in logs:
            logs[metric.name] = metric.result()
        else:
            logs.update({n: value for n, value in _results(metric).items() if n in logs})
    return logs


def _results(metric):
    result = metric.result()
    return result if isinstance(result, dict) else {metric.name: result}


def _reduce(original, values, strategy, reduction):
    if ours(strategy) is None:
        return original(values, strategy, reduction)
    if reduction == "auto":
        # The replica step has made them equal on all replicas.
        return tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)
    gather = strategy.extended.gather_rows
    if tf.executing_eagerly():
        gather = tf.function(gather, autograph=False)
    return tree.map_structure(gather, values)
