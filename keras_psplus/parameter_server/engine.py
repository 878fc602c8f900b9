"""Engine of `ParameterServerStrategy`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core import data_position, gradient_path
from keras_psplus.core import seeds as data_seeds
from keras_psplus.core.base.optimizers import unwrapped, variables_of_apply
from keras_psplus.core.batch import batches, duplicate_rows, losses
from keras_psplus.core.data_position import UnknownLength
from keras_psplus.core.distributed_engine import DistributedEngine
from keras_psplus.core.graph.variables import shape_to_be
from keras_psplus.core.models import lifted
from keras_psplus.datasets import seed_shuffles
from keras_psplus.engine import Call, answers
from keras_psplus.errors import ParameterServerLostError, WorkersLostError
from keras_psplus.keras_internals.keras_parts import (
    array_data_adapter,
    global_state,
    layers,
    py_dataset_adapter,
    stateless_scope,
    tf_dataset_adapter,
)
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks
from keras_psplus.log import info_once, logger, warn_once
from keras_psplus.parameter_server import (
    aggregation,
    dynamic_table,
    traffic,
    worker_function,
    worker_updates,
)
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.data import WorkerDataset
from keras_psplus.parameter_server.extended import kind_of
from keras_psplus.parameter_server.pulls import parts_of
from keras_psplus.parameter_server.replica_step import WorkerReplicaStep
from keras_psplus.parameter_server.runner import PredictFunction, StepRunner
from keras_psplus.parameter_server.scheduler import translate_errors
from keras_psplus.parameter_server.state import WorkerStates
from keras_psplus.parameter_server.step_functions import ServedFunction, compiled_step
from keras_psplus.parameter_server.sync_steps import SyncRunner
from keras_psplus.parameter_server.worker_function import (
    ClosureVariable,
    applying_sums_flag,
    current_trace,
    is_on_ps,
)
from keras_psplus.tables import local
from keras_psplus.tables.row_variable import is_keyed
from keras_psplus.updates import Accumulate

# Data: the chief reads them, or workers if the options say so.
#
# `experimental_distribute_dataset` and `distribute_datasets_from_function` of parameter servers
# give something that is built on the workers only, so that it has no length and no batches here.


_POLICY = tf.data.experimental.AutoShardPolicy


def on_workers(
    context: StepContext,
    adapter: Any,
    keeps_order: bool,
    of_workers: Sequence[tuple[tf.data.Dataset, int]] | None,
    seed_for: Callable[[int], int],
) -> WorkerDataset | None:
    """Makes a dataset that the workers read; None if the chief reads the data.

    `of_workers` are a dataset and a seed for each worker, if the script's function has made them.
    `seed_for` returns the seed to use instead of the one that new data would get.
    """
    if not isinstance(adapter, tf_dataset_adapter.TFDatasetAdapter):
        _say_that_the_chief_reads(context, adapter)
        return None
    dataset = adapter.get_tf_dataset()
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if of_workers is None and policy not in (_POLICY.FILE, _POLICY.DATA):
        info_once(
            "data over %d worker(s): the chief reads them and sends each batch with its step, over "
            "its own network; set AutoShardPolicy.FILE or DATA in the dataset's options to have "
            "the workers read them",
            context.num_workers,
        )
        return None
    if context.mode.is_sync:
        info_once("the chief reads the data, as it decides which worker takes what")
        return None
    if keeps_order:
        info_once("predict: the chief reads the data, so that results keep their order")
        return None
    seed, lost = seed_for(data_seeds.draw()), context.scheduler.queue.lost
    is_cut = of_workers is None
    try:
        workers = WorkerDataset(
            of_workers or [(dataset, seed)] * context.num_workers,
            policy if is_cut else None,
            dataset.element_spec,
            lost,
        )
    except ValueError as error:
        logger.warning(
            "this dataset cannot be sent to the workers (%s), so the chief reads it and sends each "
            "batch with its step, over its own network",
            error,
        )
        return None
    share = f"its own share (AutoShardPolicy.{policy.name})"
    info_once(
        "data over %d worker(s): each reads %s",
        context.num_workers,
        share if is_cut else "what the script's function has made for it",
    )
    return workers


def _say_that_the_chief_reads(context: StepContext, adapter: Any) -> None:
    if isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        info_once(
            "data over %d worker(s): arrays; the chief sends each batch with its step",
            context.num_workers,
        )
        return
    kind = "PyDataset" if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter) else "generator"
    warn_once(
        "a Python %s cannot be sent to the workers: the chief runs it and sends each batch with "
        "its step, so that all workers together are no faster than this process makes batches",
        kind,
    )


def take_apart(
    num_workers: int, arguments: dict[str, Any]
) -> list[tuple[tf.data.Dataset, int]] | None:
    """Puts a `tf.data.Dataset` in the place of a distributed one among arguments.

    Returns a dataset and a seed of its unseeded shuffles for each worker, if a function has made
    them, else None.
    """
    x = arguments.get("x")
    if not isinstance(x, tf.distribute.DistributedDataset):
        return None
    if getattr(x, "_original_dataset", None) is not None:
        arguments["x"] = x._original_dataset
        return None
    function = getattr(x, "_dataset_fn", None)
    if function is None:
        raise ValueError(
            "ParameterServerStrategy takes what its own `experimental_distribute_dataset` or "
            "`distribute_datasets_from_function` has returned, or the tf.data.Dataset itself. "
            f"Received: {x}"
        )
    contexts = [_InputContext(num_workers, i, 1) for i in range(num_workers)]
    # Shuffled data that are sharded need one order for all; each who reads everything, its own.
    datasets, draw_again = list[tf.data.Dataset](), data_seeds.remembered()
    for context in contexts:
        if contexts[0].is_asked:
            draw_again()
        dataset = function(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                "The function given to `distribute_datasets_from_function` must return a "
                f"tf.data.Dataset. Received: {dataset}"
            )
        datasets.append(dataset)
    is_sharded = any(context.is_asked for context in contexts)
    first = data_seeds.draw()
    seeds = [first if is_sharded else first + i for i in range(len(datasets))]
    # A reader of all of them has a batch of each in turn, until all have ended.
    arguments["x"] = tf.data.Dataset.choose_from_datasets(
        [seed_shuffles(dataset, seed) for dataset, seed in zip(datasets, seeds)],
        tf.data.Dataset.range(len(datasets)).repeat(),
        stop_on_empty_dataset=False,
    )
    class_weight = arguments.get("class_weight")
    adapters = [tf_dataset_adapter.TFDatasetAdapter(dataset, class_weight) for dataset in datasets]
    return [(adapter.get_tf_dataset(), seed) for adapter, seed in zip(adapters, seeds)]


class _InputContext(tf.distribute.InputContext):
    is_asked = False

    @property
    def input_pipeline_id(self) -> int:
        self.is_asked = True
        return super().input_pipeline_id


class ParameterServerEngine(DistributedEngine):
    can_run_eagerly = False
    hands_over = True
    compiled_function = ServedFunction
    exports_copies = True

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        # While results are wanted in the order of the data.
        self._keeps_order = False
        # The callbacks of the `fit` that a model is in.
        self._callbacks: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()

    @property
    def worker_state(self) -> WorkerStates:
        return self._context.extended.worker_states

    @property
    def updating(self) -> worker_updates.WorkerUpdates:
        return self._context.updating

    @property
    def _context(self) -> StepContext:
        return self.strategy._context

    # The trainer.

    def is_remote(self, layer: keras.Layer) -> bool:
        # Rows are looked up, not the whole table read.
        own = *layer._trainable_variables, *layer._non_trainable_variables
        return isinstance(layer, layers.Embedding) or any(map(is_keyed, own))

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        context = self._context
        try:
            with translate_errors(context.server_addresses):
                yield
            context.attempts.log_dropped()
        except (ParameterServerLostError, WorkersLostError):
            raise  # no step will ever come back
        except BaseException as error:
            chief = self.strategy._chief
            if chief is not None and isinstance(error, SystemExit) and error.code not in (None, 0):
                chief.note_failure()
            # Or the next call would begin with what this one had counted.
            for function in list(context.functions):
                with contextlib.suppress(Exception):
                    function.drain()
            raise

    @answers("make_function")
    def _make_function(self, call: Call) -> StepRunner:
        model, step_function, context = call.owner, call.get("step_function"), self._context
        compiled = model._autoconvert_optionals(compiled_step(self, model, step_function))

        def step(batch: Any) -> Any:
            with worker_updates.batch_rows.being(batches.rows_of(batch)):
                return compiled(batch)

        if step_function != model.train_step:
            return StepRunner(context, model, step, is_training=False)
        kind = SyncRunner if context.mode.is_sync else StepRunner
        return kind(context, model, context.updating.wrap(model, step), is_training=True)

    @answers("make_predict_function")
    def _make_predict_function(self, call: Call) -> Callable[..., Any]:
        model = call.owner
        if model.predict_function is None or call.get("force"):
            model.predict_function = PredictFunction(self._context, model)
        return model.predict_function

    @answers("predict", "predict_on_batch")
    def _predict(self, call: Call) -> Any:
        outer, self._keeps_order = self._keeps_order, call.name == "predict"
        try:
            return self._evaluate(call)
        finally:
            self._keeps_order = outer

    @answers("epoch_begin")
    def _begin_epoch(self, event: Call) -> None:
        super()._begin_epoch(event)
        self._context.steps_by_worker.clear()

    @answers("steps_end", "test_steps_end")
    def _end_steps(self, event: Call) -> Any:
        # Asked for before validation, and before other callbacks see the epoch's end and save.
        model = event.owner
        if event.name == "steps_end" and model in self._callbacks:
            take = getattr(model.train_function, "take_bad_loss", lambda: None)
            loss, callbacks = take(), self._callbacks[model]()
            if loss is not None and callbacks is not None:
                for callback in callbacks.callbacks:
                    if isinstance(callback, keras_callbacks.TerminateOnNaN):
                        callback.on_train_batch_end(self.progress.batch - 1, {"loss": loss})
        return super()._end_steps(event)

    # Data.

    @answers("make_iterator")
    def _make_iterator(self, call: Call) -> None:
        context, seed_for = self._context, self.progress.data_seed
        of_workers = take_apart(context.num_workers, call.kwargs)
        iterator = data_position.make_without_data(call)
        worker_data = on_workers(
            context, iterator.data_adapter, self._keeps_order, of_workers, seed_for
        )
        if worker_data is None:
            # A step that is given to another worker has its batch with it, and every element
            # counts once.
            dataset = iterator.data_adapter.get_tf_dataset()
            iterator._distributed_dataset = data_position.ReleasedDataset(dataset)
        else:
            self.progress.note_data_seed(worker_data.seed)
            iterator._distributed_dataset = worker_data
            iterator.data_adapter = UnknownLength(iterator.data_adapter)
            iterator._num_batches = None
        iterator.batch_spec = iterator._distributed_dataset.element_spec

    def data_position(self, iterator: Any) -> Any:
        dataset = iterator._distributed_dataset
        return dataset.position if isinstance(dataset, WorkerDataset) else None

    def skip_data(self, iterator: Any, epochs: int, batches: int, position: Any) -> None:
        dataset = iterator._distributed_dataset
        if not isinstance(dataset, WorkerDataset):
            super().skip_data(iterator, epochs, batches, position)
        elif position is not None:
            dataset.begin_at(position)
            for _ in range(0, batches, iterator.steps_per_execution):
                next(iterator._epoch_iterator, None)

    @answers("drain")
    def _drain(self, call: Call) -> None:
        self.finish_steps()

    def finish_steps(self) -> None:
        self._context.drain()

    # Variables.

    @answers("make_variable")
    def _make_variable(self, call: Call) -> None:
        # Here, as some are initialized later, when nothing tells any more.
        variable, scopes = call.owner, global_state.get_global_attribute("name_scope_stack")
        variable._is_of_layer = bool(scopes) and isinstance(scopes[-1].caller, layers.Layer)
        super()._make_variable(call)
        variable._is_made_to_train = variable._trainable

    @answers("make_table")
    def _make_dynamic_table(self, call: Call) -> dynamic_table.PlacedTable:
        spec, scheduler = call.get("spec"), self._context.scheduler
        for argument, value in ("cache", spec.get("cache")), ("updates", self.strategy.updates):
            if value is not None:
                raise ValueError(
                    f"`{argument}` does not go with a DynamicEmbedding's table under "
                    "ParameterServerStrategy, whose rows are on the servers alone, where each step "
                    f"updates them. Leave it out, or use keras_psplus.HybridStrategy for `cache`. "
                    f"Received: {argument}={value!r} with the table '{call.owner.path}'"
                )
        servers = dynamic_table.Servers(
            [f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(self.strategy._num_ps)],
            self.worker_state.prefix,
            lambda: None if scheduler.queue.is_empty else scheduler.join(),
        )
        return dynamic_table.PlacedTable(spec, call.owner.trainable, servers=servers)

    @answers("initialize")
    def _initialize(self, call: Call) -> Any:
        # A frozen layer's weights are initialized after they were frozen. They may come to be
        # trained.
        variable, value = call.owner, call.get("value")
        trainable = variable._trainable
        variable._trainable = getattr(variable, "_is_made_to_train", trainable)
        try:
            shape = shape_to_be(variable, value)
            kind = kind_of(variable, shape, self._context.mode.is_sync)
            with self._context.extended.creating(variable.path, kind, shape):
                return call.proceed()
        finally:
            variable._trainable = trainable

    @answers("assign", "numpy")
    def _wait_and_proceed(self, call: Call) -> Any:
        # From a callback, for example: steps that were sent before come before.
        variable = call.owner._value
        if current_trace() is None and tf.executing_eagerly():
            if isinstance(variable, ClosureVariable):
                self._context.drain()
            elif is_on_ps(variable) and not self._context.scheduler.queue.is_empty:
                self._context.scheduler.join()
        return call.proceed()

    @answers("assign_add", "assign_sub")
    def _change(self, call: Call) -> Any:
        own = call.owner._value
        is_shared = self._context.extended.has_made(own)
        if stateless_scope.in_stateless_scope() or not is_shared or tf.executing_eagerly():
            return call.proceed()
        # Keras reads, adds and writes: another worker's step in between would be lost.
        value = tf.cast(call.get("value"), own.dtype)
        return getattr(own, call.name)(value, read_value=False)

    @answers("conv")
    def _convolve(self, call: Call) -> Any:
        return call.proceed(kernel=tf.convert_to_tensor(call.get("kernel")))

    def reads_rows(self, variable: keras.Variable) -> bool:
        is_other = stateless_scope.in_stateless_scope()
        return not is_other and is_on_ps(variable._value)

    @answers("add_slot")
    def _add_slot(self, call: Call) -> keras.Variable:
        # On its variable's server, which Keras asks for in the graph of a step that makes it.
        with lifted(self.strategy):
            return call.proceed()

    # Optimizers.

    def gradient(self, call: Call) -> Any:
        step = WorkerReplicaStep.current()
        is_alone = self.strategy.num_workers == 1 or not losses.is_by_variables(call)
        if step is None or is_alone:
            return losses.gradient(call)
        if step.is_inside:
            # Gradients that leave a function, or are computed row by row, count when handed over.
            grads = losses.gradient_of_own_mean(call)
            return step.note_inside(grads, call.get("sources"))
        return losses.note_gradients(call, losses.gradient(call), step, step.note)

    @answers("build_optimizer")
    def _build_optimizer(self, call: Call) -> Any:
        is_of_wholes = isinstance(call.owner, keras.optimizers.Adafactor)
        for variable in call.get("variables") if is_of_wholes else ():
            shards = len(parts_of(variable._value))
            if shards == 1:
                continue
            raise ValueError(
                "Adafactor computes with whole rows and columns of a weight, and shards of a "
                "variable are updated one by one. Pass `variable_partitioner=None` to the strategy "
                "to keep variables whole, or take another optimizer. "
                f"Received: {call.owner.name} for {variable.path}, in {shards} shards"
            )
        return super()._build_optimizer(call)

    def apply(self, call: Call) -> Any:
        strategy, step, optimizer = self.strategy, WorkerReplicaStep.current(), call.owner
        grads, trainable_variables = call.get("grads"), call.get("trainable_variables")
        if self._is_on_worker and strategy.updates is not None and not worker_updates.applying_flag:
            variables = variables_of_apply(optimizer, strategy.updates, grads, trainable_variables)
            updating = self._context.updating
            if variables is not None and updating.take(optimizer, list(grads), variables):
                return None
        inner = unwrapped(optimizer)
        known = inner._trainable_variables if trainable_variables is None else trainable_variables
        if step is not None and len(grads):
            return step.hand_over(optimizer, list(grads), list(known))
        if inner is not optimizer or not tf.distribute.get_replica_context():
            return call.proceed()
        return aggregation.apply_and_constrain(strategy, known, call.proceed)

    @property
    def _is_on_worker(self) -> bool:
        """Whether this is the function of a worker that steps by itself."""
        return (
            not self._context.mode.is_sync
            and tf.distribute.get_replica_context() is not None
            and not tf.executing_eagerly()
        )

    def accumulate(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        if not self._is_on_worker:
            return super().accumulate(optimizer, grads, variables)

        # Keras's own sums are where the variables are, so that each batch would send its gradients
        # to be added, and the update would bring the sums back. Here they stay on the worker.
        def update(means: list[Any], variables: list[Any]) -> None:
            # Keras's sums are whole tensors: a row that came twice is one there.
            means = [duplicate_rows.distinct(mean) for mean in means]
            gradient_path.update(self, optimizer, means, variables)

        # The counters of Keras are those of all workers together: each counts its own batches.
        policy = Accumulate(optimizer.gradient_accumulation_steps)
        return self._context.updating.accumulate(optimizer, policy, grads, variables, update)

    def clip(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
        if applying_sums_flag:
            return aggregation.clip(optimizer, grads)
        return super().clip(optimizer, grads, variables)

    def update(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        with traffic.timing_push(grads):
            super().update(optimizer, grads, variables)

    def push(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        # On the chief, which keeps nothing; the sums of a step, which are there already; or to a
        # worker's own copies.
        if tf.executing_eagerly() or applying_sums_flag or worker_function.handles() is not None:
            left = local.update(optimizer, grads, variables, optimizer.learning_rate)
            return super().push(optimizer, *left)
        return dynamic_table.keep(optimizer, self._context.push(optimizer, grads, variables))

    def average(self, optimizer: Any, variables: list[Any]) -> None:
        aggregation.average(self.strategy, optimizer, variables)

    # Callbacks and saving.

    @property
    def are_servers_preempted(self) -> Callable[[], bool] | None:
        # A worker keeps nothing: others take its steps.
        chief = self.strategy._chief
        return None if chief is None else functools.partial(chief.are_told_to_end, "ps")

    @answers("train_begin")
    def _begin_training(self, event: Call) -> Any:
        callbacks = event.owner
        self._callbacks[callbacks._model] = weakref.ref(callbacks)
        getattr(callbacks._model.train_function, "begin_training", lambda: None)()
        return super()._begin_training(event)
