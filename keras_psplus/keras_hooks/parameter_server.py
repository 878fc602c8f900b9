"""The trainer and variables under `ParameterServerStrategy`: steps go to the workers."""

import contextlib
import threading
import weakref

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import core, trainer
from tensorflow.python.framework import tensor_conversion_registry

from keras_psplus.keras_hooks import data, ps_data
from keras_psplus.keras_hooks.ownership import asynchronous, note_live
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.keras_hooks.variables import accumulates
from keras_psplus.parameter_server import failure
from keras_psplus.parameter_server.steps import StepFunctions, StepRunner, are_same, describe
from keras_psplus.parameter_server.worker_data import WorkerIterator
from keras_psplus.parameter_server.worker_function import TravellingVariable, current, pack, unpack

_local = threading.local()
_functions = weakref.WeakKeyDictionary()


def install():
    """Installs this module's hooks."""
    tf_trainer = trainer.TensorFlowTrainer
    replace(tf_trainer, "_make_function", ["self", "step_function"])(_make_function)
    replace(tf_trainer, "make_predict_function", ["self", "force"])(_make_predict_function)
    replace(trainer.TFEpochIterator, "__init__", ["self", "distribute_strategy"])(_init_iterator)
    replace(trainer.TFEpochIterator, "tf_sync", ["self"])(_sync)
    for name in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        replace(tf_trainer, name, ["self", "x"])(_explained)
    replace(tf_trainer, "predict", ["self", "x"])(_predict)
    replace(core.Variable, "_initialize", ["self", "value"])(_initialize)
    replace(core.Variable, "_direct_assign", ["self", "value"])(_after_earlier_steps)
    replace(core.Variable, "numpy", ["self"])(_after_earlier_steps)
    replace(core.Variable, "assign_add", ["self", "value"])(_atomically("assign_add"))
    replace(core.Variable, "assign_sub", ["self", "value"])(_atomically("assign_sub"))
    # tf.gather asks its argument for this method: without it a lookup pulls the whole table.
    core.Variable.sparse_read = _sparse_read


def _explained(original, self, *args, **kwargs):
    strategy = asynchronous(self._distribute_strategy)
    if strategy is None:
        return original(self, *args, **kwargs)
    try:
        with failure.explained(strategy):
            return original(self, *args, **kwargs)
    except (failure.ParameterServerLostError, failure.WorkersLostError):
        raise  # no step will ever come back
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            strategy.note_bad_end()
        # Or the next call would begin with what this one had counted.
        for function in list(_functions.get(strategy, ())):
            with contextlib.suppress(Exception):
                function.drain()
        raise


def _predict(original, self, *args, **kwargs):
    outer, _local.in_order = getattr(_local, "in_order", False), True
    try:
        return _explained(original, self, *args, **kwargs)
    finally:
        _local.in_order = outer


def _init_iterator(original, self, distribute_strategy=None, *args, **kwargs):
    strategy = asynchronous(distribute_strategy)
    if strategy is None:
        return original(self, distribute_strategy, *args, **kwargs)
    super(trainer.TFEpochIterator, self).__init__(*args, **kwargs)
    self._distribute_strategy = strategy
    in_order = getattr(_local, "in_order", False)
    self._distributed_dataset = worker_data = ps_data.on_workers(
        strategy, self.data_adapter, in_order
    )
    if worker_data is None:
        # A step that is given to another worker has its batch with it, and every element counts
        # once.
        self._distributed_dataset = self.data_adapter.get_tf_dataset()
    else:
        self.data_adapter = data.UnknownLength(self.data_adapter)
        self._num_batches = None
    self.batch_spec = self._distributed_dataset.element_spec


def _sync(original, self):
    strategy = asynchronous(self._distribute_strategy)
    if strategy is None:
        return original(self)
    _drain(strategy)


def _make_function(original, self, step_function):
    strategy = asynchronous(self._distribute_strategy)
    if strategy is None:
        return original(self, step_function)
    function = _StepFunction(self, strategy, step_function)
    _functions.setdefault(strategy, weakref.WeakSet()).add(function)
    return function


class _StepFunction:
    """A train or test function whose steps run on the workers, several at a time."""

    def __init__(self, model, strategy, step_function):
        self._model = model
        self._strategy, self._scheduler = strategy, strategy.scheduler
        step = model._autoconvert_optionals(step_function)
        self._runner = StepRunner(strategy, step, lambda: _weights(model))
        # One dict for a whole epoch: Keras keeps the last that it got, and gets to see in it what
        # steps bring back later.
        self._logs = {}

    def __call__(self, iterator):
        ticket = None
        if isinstance(iterator, WorkerIterator):
            ticket = self._scheduler.take(iterator, self._model.steps_per_execution)
            batches = ticket.batches if ticket else []
            element_spec = iterator.element_spec
        else:
            batches = _take(iterator, self._model.steps_per_execution)
            element_spec = getattr(iterator, "element_spec", None)
        if not batches:
            # Keras does not synchronise when it runs out of data: the totals are written here.
            self.drain()
            raise StopIteration
        _drain(self._strategy, but=self)
        self._runner.submit(batches, _tensors_spec(element_spec, batches), ticket)
        self._logs.clear()
        self._logs.update(self._runner.logs)
        logs = self._logs
        if not isinstance(iterator, (tf.data.Iterator, WorkerIterator)):
            self.drain()
        return logs

    def drain(self):
        """Waits for all steps; metrics and logs are those of all of them then."""
        if not self._runner.is_open:
            return
        variables = self._runner.variables
        self._runner.join()
        self._logs.update(self._runner.logs)
        self._runner.close()
        for metric in self._model.metrics:
            if any(v._value is used for v in metric.variables for used in variables):
                for name, value in _flat({metric.name: metric.result()}).items():
                    if name in self._logs:
                        self._logs[name] = value.numpy()
        self._logs = {}


def _flat(results):
    flat = {}
    for name, value in results.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _drain(strategy, but=None):
    """Waits for the steps of all functions and writes what they have counted."""
    for function in list(_functions.get(strategy, ())):
        if function is not but:
            function.drain()


def _weights(model):
    return [variable._value for variable in model.weights]


def _take(iterator, count):
    batches = []
    for _ in range(count):
        try:
            batches.append(_tensors(next(iterator)))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return batches


def _tensors(batch):
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]

    def convert(leaf):
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        return tf.convert_to_tensor(leaf)

    return tree.map_structure(convert, batch)


def _tensors_spec(element_spec, batches):
    """The dataset's element specification in the form of `_tensors`, if it describes batches."""
    if element_spec is None:
        return None
    while isinstance(element_spec, tuple) and len(element_spec) > 1:
        if not isinstance(element_spec[-1], tf.OptionalSpec):
            break
        element_spec = element_spec[:-1]
    try:
        tf.nest.assert_same_structure(element_spec, batches[0], expand_composites=True)
    except (TypeError, ValueError):
        return None
    return element_spec


def _make_predict_function(original, self, force=False):
    strategy = asynchronous(self._distribute_strategy)
    if strategy is None:
        return original(self, force)
    if self.predict_function is not None and not force:
        return self.predict_function

    def concatenated(trace, outputs):
        result = outputs[0]
        if len(outputs) > 1:
            result = tree.map_structure(lambda *parts: trainer.concat(list(parts)), *outputs)
        return (trace.changes(), result), ()

    step = self._autoconvert_optionals(self.predict_step)
    function = _PredictFunction(
        strategy, StepFunctions(strategy, step, concatenated, lambda: _weights(self))
    )
    _functions.setdefault(strategy, weakref.WeakSet()).add(function)
    self.predict_function = function
    return function


class _PredictFunction:
    """A predict function whose steps run on the workers; their outputs are waited for later."""

    def __init__(self, strategy, functions):
        self._strategy, self._functions = strategy, functions
        self._sent, self._seeds = 0, None

    def __call__(self, batches):
        batches = [_tensors(batch) for batch in batches]
        function, payload = self._functions(batches)
        if self._seeds is None or not are_same(self._seeds.variables, function.variables):
            self.drain()
            self._seeds = _Seeds(function.variables)
        result = self._strategy.scheduler.submit(
            function.concrete,
            (tf.constant(self._seeds.values()), payload),
            lambda result: None,
            f"predict(), {describe(batches, self._sent)}",
        )
        self._sent += len(batches)
        self._seeds.count(len(batches), lambda: result.get()[0].numpy())
        outputs = function.concrete.structured_outputs[1]
        if any(not isinstance(output, tf.Tensor) for output in tf.nest.flatten(outputs)):
            return result.get()[1]
        places = tf.nest.pack_sequence_as(outputs, range(len(tf.nest.flatten(outputs))))
        return tree.map_structure(lambda place: _Awaited(result, place), places)

    def drain(self):
        """Leaves seeds where they would be after as many steps here."""
        if self._seeds is not None:
            self._seeds.write()
        self._sent, self._seeds = 0, None


class _Seeds:
    """Moves seeds on from step to step, by as much as the first step moves them."""

    def __init__(self, variables):
        self.variables = variables
        self._initial = pack(variables)
        self._move, self._steps = None, 0

    def values(self):
        return self._initial if self._move is None else self._initial + self._move * self._steps

    def count(self, steps, changes):
        if self._move is None:
            has_seeds = any(variable.is_seed for variable in self.variables)
            self._move = changes() / steps if has_seeds else 0.0
        self._steps += steps

    def write(self):
        if self._move is not None and any(variable.is_seed for variable in self.variables):
            unpack(self.variables, self.values())


class _Awaited:
    """An output of a predict step that may still be under way; a tensor to whoever asks."""

    def __init__(self, result, place):
        self._result, self._place = result, place

    def _tensor(self):
        return tf.nest.flatten(self._result.get()[1])[self._place]

    def numpy(self):
        """Waits for the step and returns its output."""
        return self._tensor().numpy()

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def __getitem__(self, key):
        return self._tensor()[key]

    def __len__(self):
        return len(self._tensor())

    def __getattr__(self, name):
        return getattr(self._tensor(), name)


tensor_conversion_registry.register_tensor_conversion_function(
    _Awaited, lambda value, dtype=None, name=None, as_ref=False: value._tensor()
)


def _initialize(original, self, value):
    strategy = asynchronous(tf.distribute.get_strategy())
    if strategy is None:
        return original(self, value)
    note_live(strategy)
    is_seed = self._name == "seed_generator_state"
    with strategy.extended.creating(self.path, accumulates(self) or is_seed, is_seed):
        return original(self, value)


def _after_earlier_steps(original, self, *args):
    # From a callback, for example: steps that were sent before come before.
    if current() is None and tf.executing_eagerly():
        travels = isinstance(self._value, TravellingVariable)
        if travels or _on_ps(self._value):
            for strategy in list(_functions):
                if travels:
                    _drain(strategy)
                elif strategy.scheduler.is_busy:
                    strategy.scheduler.join()
    return original(self, *args)


def _atomically(method):
    def assign(original, self, value):
        variable = self._value
        is_shared = _on_ps(variable) or isinstance(variable, TravellingVariable)
        if in_stateless_scope() or not is_shared or tf.executing_eagerly():
            return original(self, value)
        # Keras reads, adds and writes: another worker's step in between would be lost.
        return getattr(variable, method)(tf.cast(value, variable.dtype), read_value=False)

    return assign


def _on_ps(variable):
    return "/job:ps/" in (getattr(variable, "device", None) or "")


def _sparse_read(self, indices, name=None):
    if in_stateless_scope() or not _on_ps(self._value):
        # As if Keras's variables had no such method: tf.gather reads the whole value then.
        raise AttributeError("sparse_read")
    return self._maybe_autocast(self._value.sparse_read(indices, name=name))
