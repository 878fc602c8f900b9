"""Engine of `PipelineStrategy`, and the chief's errors and watches of lost stages."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.arguments import shown
from keras_psplus.cluster.channel import ConnectionWatch
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.ports import control_address
from keras_psplus.core import data_position
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.distributed_engine import DistributedEngine
from keras_psplus.core.jobs import failure
from keras_psplus.core.models import lifted
from keras_psplus.core.worker_state import WorkerState
from keras_psplus.engine import Call, answers
from keras_psplus.errors import StageLostError
from keras_psplus.log import logger
from keras_psplus.pipeline import costs, microbatches, schedule
from keras_psplus.pipeline.context import PipelineContext
from keras_psplus.pipeline.pipedream import PipeDreamFunction
from keras_psplus.pipeline.step_function import PipelineTrainFunction, PredictFunction
from keras_psplus.pipeline.traced_step import PipelineStep, Update

# Errors of the chief about a lost stage.


# Errors after a task is lost. The last two come from leftovers of an earlier step.
_OF_TASKS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.InternalError,
    tf.errors.CancelledError,
)


@contextlib.contextmanager
def translate_errors(strategy: tf.distribute.Strategy) -> Iterator[None]:
    try:
        yield
    except _OF_TASKS as error:
        number = None if strategy.task is None else _lost_worker(strategy, str(error))
        if number is None:
            raise
        failure.mark_failed()
        raise lost(strategy, number, failure.relevant_line(error)) from error


def _lost_worker(strategy: tf.distribute.Strategy, message: str) -> int | None:
    found = re.search(r"/job:worker/replica:0/task:(\d+)", message)
    if found:
        return int(found.group(1))
    # Some errors say no more than "Socket closed".
    return next(iter(stalls.unresponsive_tasks(addresses(strategy))), None)


def lost(strategy: tf.distribute.Strategy, number: int, received: str) -> StageLostError:
    address = strategy.task.cluster["worker"][number]
    stage = number % strategy.num_stages
    layers = "none yet" if strategy.plan is None else strategy.plan.stages[stage].described
    return StageLostError(
        f"worker-{number} ({address}), which has {stage_of_worker(strategy, number)} (layers: "
        f"{layers}), stopped answering; the variables that it held are lost. Look into that task's "
        "log, then start the whole job again: with the BackupAndRestore callback training resumes "
        f"where the last backup was made. Received: {received}"
    )


def stage_of_worker(strategy: tf.distribute.Strategy, number: int) -> str:
    """Description of a worker's stage, and of its pipeline if there are several."""
    pipeline, stage = divmod(number, strategy.num_stages)
    return f"stage {stage} of pipeline {pipeline}" if strategy.pipelines > 1 else f"stage {stage}"


# Detection of waits of the chief, and of workers that stop responding.


_LOOK_SECONDS = 1.0


class StallProbe(stalls.StallProbe):
    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__("chief-0", strategy.progress)
        self._strategy = weakref.ref(strategy)

    def describe(self, entered: int) -> str:
        strategy = self._strategy()
        silent = stalls.unresponsive_tasks(addresses(strategy))
        missing = ", ".join(
            f"worker-{i} ({stage_of_worker(strategy, i)}; no answer)" for i in silent
        )
        return (
            "the stages; not arrived: "
            f"{missing or 'none; the step may still be traced, or a stage is slow'}"
        )


class Watch:
    """Watchdog that ends the job when a worker does not respond for a while.

    A worker that hangs ends no call; the keepalive of its control channel finds that out.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout: float) -> None:
        self._strategy, self._timeout = weakref.ref(strategy), timeout
        channels = {str(i): control_address(a) for i, a in addresses(strategy).items()}
        self._connections = ConnectionWatch(channels, timeout)
        threading.Thread(target=self._run, name="pipeline watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(min(_LOOK_SECONDS, self._timeout / 8))
            strategy = self._strategy()
            if strategy is None:
                self._connections.close()
                return
            for number, silence in self._connections.silences().items():
                if silence >= self._timeout:
                    received = f"no answer for {self._timeout:g} s (heartbeat_timeout)"
                    logger.error("%s", lost(strategy, int(number), received))
                    failure.exit_now()
            del strategy


def addresses(strategy: tf.distribute.Strategy) -> dict[int, str]:
    if strategy is None or strategy.task is None:
        return {}
    return dict(enumerate(strategy.task.cluster["worker"]))


class _NothingKept(WorkerState):
    kind = "pipeline"
    has_any, may_keep, units, total = False, False, (), 0

    def assign(
        self, owner: Any, values: Mapping[int, Mapping[str, np.ndarray]], is_strict: bool
    ) -> None:
        pass

    def _check(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError(
                "`PipelineStrategy` keeps nothing from step to step: leave the state out. "
                f"Received: state={shown(state)}"
            )


class PipelineEngine(DistributedEngine):
    can_run_eagerly = False
    exports_copies = True

    def __init__(self, strategy: tf.distribute.Strategy, context: PipelineContext) -> None:
        super().__init__(strategy)
        self.context = context
        self._nothing_kept = _NothingKept(self.settle)

    @property
    def worker_state(self) -> WorkerState:
        return self._nothing_kept

    @property
    def are_servers_preempted(self) -> Callable[[], bool] | None:
        chief = self.strategy._chief
        return None if chief is None else functools.partial(chief.are_told_to_end, "worker")

    # Steps that are under way.

    def settle(self, model: keras.Model | None = None) -> None:
        if self.context.under_way is not None:
            self.context.under_way.finish()

    @answers("steps_end", "test_steps_end")
    def _end_steps(self, event: Call) -> dict[str, Any]:
        if self.context.under_way is not None and event.name == "steps_end":
            event = event.changed(logs=self.context.under_way.finish())
        return super()._end_steps(event)

    def _settle_for(self, variable: Any) -> None:
        steps = self.context.under_way
        if steps is not None and tf.executing_eagerly() and steps.has(variable):
            self.settle()

    # The trainer.

    def translate_errors(self) -> AbstractContextManager[None]:
        return translate_errors(self.strategy)

    def build(self, call: Call) -> None:
        iterator = call.get("iterator")
        spec = iterator.batch_spec if iterator is not None else call.get("data_batch")
        batch_rows = getattr(iterator, "batch_rows", None)
        self.context.splitter.split(self, call.owner, spec, trains=True, batch_rows=batch_rows)
        super().build(call)

    def run(self, call: Call) -> Any:
        if call.name != "compile":
            # A checkpoint of TensorFlow's, say, was read past `assign`.
            self.context.copies.is_stale = True
            self.context.has_written = True
        return super().run(call)

    def _divides_train_step(self, model: keras.Model) -> bool:
        """Whether losses and gradients are computed micro-batch by micro-batch."""
        if self.strategy.schedule == "gpipe":
            return False
        reason = microbatches.why_not_divided(model)
        if reason is None and self.context.splitter.has_masks(model):
            reason = "its outputs have masks, by whose number of entries the loss is divided"
        if reason is not None:
            text = (
                'the model \'%s\' is trained by schedule "gpipe" instead of "1f1b": %s. The '
                "results are those of one process; each stage keeps the activations of all "
                "micro-batches"
            )
            if self.strategy.schedule == schedule.PIPEDREAM:
                text = (
                    "for the model '%s', each stage keeps the activations of all micro-batches of "
                    "a batch: %s"
                )
            logger.info(text, model.name, reason)
        return reason is None

    @answers("make_function")
    def _make_function(self, call: Call) -> Any:
        model, step_function = call.owner, call.get("step_function")
        self.settle()
        if self.strategy.schedule == schedule.PIPEDREAM and step_function == model.train_step:
            return PipeDreamFunction(self, self.context, model, self._divides_train_step(model))
        divides = step_function == model.train_step and self._divides_train_step(model)
        return PipelineTrainFunction(self, self.context, model, step_function, divides)

    @answers("make_predict_function")
    def _make_predict_function(self, call: Call) -> Any:
        model = call.owner
        if model.predict_function is None or call.get("force"):
            model.predict_function = PredictFunction(self, self.context, model)
        return model.predict_function

    @answers("reduce_outputs")
    def _reduce_outputs(self, call: Call) -> Any:
        return call.owner

    # Data.

    @answers("make_iterator")
    def _make_iterator(self, call: Call) -> None:
        iterator = data_position.make_without_data(call)
        dataset = iterator.data_adapter.get_tf_dataset()
        iterator._distributed_dataset = data_position.ReleasedDataset(dataset)
        iterator.batch_spec = dataset.element_spec
        iterator.batch_rows = microbatches.rows_of_data(iterator.data_adapter, dataset)

    # Variables and layers.

    @answers("make_layer")
    def _make_layer(self, call: Call) -> Any:
        self.context.stages.note_made(call.owner)
        return call.proceed()

    @answers("make_variable")
    def _make_variable(self, call: Call) -> Any:
        super()._make_variable(call)
        # As TensorFlow's variables have theirs: without the strategy, it cannot be read.
        variable = call.owner
        variable._made_in = self.strategy
        variable._is_made_to_train = variable._trainable

    @answers("initialize_with_initializer")
    def _initialize_with_initializer(self, call: Call) -> Any:
        self.context.variables.initialize(call.owner, call.get("initializer"))

    @answers("assign")
    def _assign(self, call: Call) -> Any:
        step, variable = PipelineStep.current(), call.owner
        if step is not None and step.is_replaying:
            return call.get("value")  # It was given that before.
        self.context.variables.ensure(variable)
        self._settle_for(variable)
        self.context.copies.note_changed(variable)
        if tf.executing_eagerly():
            self.context.has_written = True
        return call.proceed()

    @answers("numpy")
    def _read(self, call: Call) -> Any:
        self.context.variables.ensure(call.owner)
        self._settle_for(call.owner)
        return call.proceed()

    @answers("exclude_from_weight_decay")
    def _exclude_from_weight_decay(self, call: Call) -> Any:
        for variable in call.get("var_list") or ():
            self.context.variables.ensure(variable)
        return call.proceed()

    @answers("next_seed")
    def _next_seed(self, call: Call) -> tf.Tensor:
        step = PipelineStep.current()
        return call.proceed() if step is None else step.next_seed(call.proceed)

    @answers("call_layer")
    def _call_layer(self, call: Call) -> Any:
        step = current_step()
        assert isinstance(step, (PipelineStep, costs.Recorder))
        return step.call(call.original, call.owner, call.args, call.kwargs)

    @answers("run_graph")
    def _run_graph(self, call: Call) -> Any:
        step = PipelineStep.current()
        return call.proceed() if step is None else step.run_graph(call)

    # Gradients and optimizers: those of the whole batch, as in one process.

    def gradient(self, call: Call) -> Any:
        recorder = costs.Recorder.current()
        return call.proceed() if recorder is None else recorder.gradient(call.get("sources"))

    def apply(self, call: Call) -> Any:
        optimizer, grads = call.owner, call.get("grads")
        trainable_variables = call.get("trainable_variables")
        step, recorder = PipelineStep.current(), costs.Recorder.current()
        if recorder is not None:
            known = optimizer._trainable_variables if optimizer.built else []
            recorder.applied.append((optimizer, list(trainable_variables or known)))
            return None
        if step is None or step.updates is None:
            return call.proceed()
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                'A loss scale changes between batches, and `schedule="pipedream"` computes two of '
                'them at the same time. Use the dtype policy "mixed_bfloat16", without one, or '
                f'`schedule="1f1b"`. Received: optimizer={optimizer.name}'
            )
        if trainable_variables is None:
            trainable_variables = optimizer._trainable_variables
        step.updates.append(Update(optimizer, list(grads), list(trainable_variables)))

    @answers("build_optimizer")
    def _build_optimizer(self, call: Call) -> Any:
        # Keras looks variables up by what TensorFlow's are.
        for variable in call.get("variables"):
            self.context.variables.ensure(variable)
        return super()._build_optimizer(call)

    @answers("add_slot")
    def _add_slot(self, call: Call) -> Any:
        variables, reference = self.context.variables, call.get("reference_variable")
        # In the replica's step, there is no scope to make a variable in.
        with lifted(self.strategy), variables.beside(reference):
            slot = call.proceed()
        variables.note_slot(slot, reference)
        return slot

    # Saving.

    def finish_steps(self) -> None:
        self.settle()

    @answers("has_memory_for_file")
    def _has_memory_for_file(self, call: Call) -> bool:
        # The chief need not have room for a model that is on all stages.
        return False
