"""Keras's train step, taken micro-batch by micro-batch, and the stages' actions on each of them.

The loss and the gradients of each micro-batch are computed as soon as its outputs are there, so
that a stage can let go of its activations. The sums of gradients are those of the batch's loss, and
metrics see the outputs of the whole batch, as in Keras's own step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.keras_internals.keras_parts import (
    BaseTrainer,
    TensorFlowTrainer,
    get_keras_mask,
    tree,
    unpack_x_y_sample_weight,
)
from keras_psplus.pipeline.base import gradients, schedule
from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.replicas import Reads
from keras_psplus.pipeline.step.times import Segment, StageClock


class TurnStep(Protocol):
    """Step while it is traced, as its micro-batches and actions see it: a `PipelineStep`."""

    stages: Stages
    part: Microbatch | None
    activations: list[tf.Tensor]
    traced: list[schedule.Actions]
    done: list[dict[tuple[str, int], list[tf.Tensor]]]
    before: list[dict[tuple[str, int], list[tuple[str, int]]]]
    clock: StageClock | None

    def note_backward(
        self, worker: int, turn: int, made: list[tf.Operation], of_inputs: list[tf.Tensor]
    ) -> None: ...


class Microbatch:
    """Context in which layers are called for one micro-batch.

    Args:
        first: Its first row in the batch.
        end: One past its last row.
        fraction: Its part of the batch's rows.
        reads: For each pipeline, a context in which its copies of weights are read.

    Attributes:
        pipeline: Number of the pipeline that it goes through.
        turn: Its number among those of its pipeline.
        reads: A context in which the pipeline's copies of weights are read.
        sums: How many sums over micro-batches it has asked for.
    """

    def __init__(
        self, step: TurnStep, number: int, first: int, end: int, fraction: float, reads: list[Reads]
    ) -> None:
        self._step = step
        self.number, self.first, self.end, self.fraction = number, first, end, fraction
        self.turn, self.pipeline = divmod(number, len(reads))
        self.reads = reads[self.pipeline]
        self.sums = 0

    def __enter__(self) -> Microbatch:
        self.reads.__enter__()
        self._step.part = self
        return self

    def __exit__(self, *exc: Any) -> None:
        self._step.part = None
        self.reads.__exit__(*exc)


class StageAction:
    """Context of a stage's action on one micro-batch, after its previous action.

    Without that order, a stage with one thread would do a part of every micro-batch before it sends
    the first of them. Operations wait for those that were traced before, so there can be no cycle.

    Args:
        direction: `schedule.FORWARD` or `schedule.BACKWARD`.
    """

    def __init__(self, step: TurnStep, stage: int, part: Microbatch, direction: str) -> None:
        self._step, self._reads, self._action = step, part.reads, (direction, part.turn)
        self._worker = part.pipeline * len(step.stages.devices) + stage
        self._of_inputs: list[tf.Tensor] = []
        self._segment: Segment | None = None

    def begins_with(self, given: Any) -> None:
        """Notes with what it begins, before it is entered."""
        if self._step.clock is not None:
            self._segment = self._step.clock.begin(self._worker, self._action, given)

    def __enter__(self) -> StageAction:
        self._context = contextlib.ExitStack()
        if self._action[0] == schedule.BACKWARD:
            self._graph = tf.compat.v1.get_default_graph()
            self._first = len(self._graph.get_operations())
        # A layer that computes itself again for its gradients reads its weights again.
        self._context.enter_context(self._reads)
        self._context.enter_context(tf.control_dependencies(list(self._tensors_before())))
        return self

    def __exit__(self, *exc: Any) -> Any:
        if self._action[0] == schedule.BACKWARD:
            made = self._graph.get_operations()[self._first :]
            self._step.note_backward(self._worker, self._action[1], made, self._of_inputs)
        return self._context.__exit__(*exc)

    def _tensors_before(self) -> Iterator[tf.Tensor]:
        traced, done = self._step.traced[self._worker], self._step.done[self._worker]
        direction = self._action[0]
        last = next((one for one in reversed(traced) if one[0] == direction), None)
        if last == self._action:
            return  # A later layer of the same turn.
        traced.append(self._action)
        if direction == schedule.BACKWARD:
            return
        wanted = {last, *self._step.before[self._worker].get(self._action, ())} - {None}
        if self._segment is not None:
            self._segment.after |= wanted
        for action in sorted(wanted):
            yield from done.get(action, ())

    def ends_with(self, tensors: list[tf.Tensor], activations: list[tf.Tensor]) -> None:
        """Notes what is computed last, and what other stages may need."""
        self._step.activations += activations
        self._of_inputs = activations
        if self._segment is not None and self._step.clock is not None:
            self._step.clock.end(self._segment, self._worker, tensors, activations)
        if tensors:
            self._step.done[self._worker][self._action] = list(tensors)


# Losses of Keras that compare the rows of a batch, or divide by sums over them.
_COUPLING = ("Circle", "Dice", "Tversky")
_REDUCTIONS = ("sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")


def why_not_divided(model: keras.Model) -> str | None:
    """Reason why a model's train step needs whole batches; None if it does not."""
    for name, owner in (
        ("train_step", TensorFlowTrainer),
        ("compute_loss", BaseTrainer),
        ("_compute_loss", BaseTrainer),
    ):
        if getattr(getattr(model, name), "__func__", None) is not getattr(owner, name):
            return f"it has its own `{name.lstrip('_')}`, which sees whole batches"
    for loss in tree.flatten(model.loss):
        if getattr(loss, "ignore_class", None) is not None:
            return f"its loss {loss!r} is divided by the number of entries that are not ignored"
        if loss is not None and not _is_mean_of_rows(loss):
            return f"its loss {loss!r} may compare the rows of a batch"
    return None


def _is_mean_of_rows(loss: Any) -> bool:
    """Whether a loss is known to be computed for each row by itself."""
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        if type(loss).__name__ in _COUPLING or loss.reduction not in _REDUCTIONS:
            return False
        loss = getattr(loss, "fn", type(loss))
    name = getattr(loss, "__name__", "")
    is_kerass = getattr(loss, "__module__", "").startswith("keras.src.losses")
    return is_kerass and name.title() not in _COUPLING


def step_of(model: keras.Model) -> Callable[[Any], Any]:
    """The train step of a model.

    Args:
        model: Keras model for which `why_not_divided` is None.

    Returns:
        Function of a batch that returns logs. It is called in a `PipelineStep`.
    """

    def train_step(data: Any) -> Any:
        step: Any = current_step()
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        weights = model.trainable_weights
        rows = step.rows_of(data)
        outputs, losses, sizes = [], [], []
        # By pipeline.
        sums: dict[int, list[Any]] = {}
        for part in step.microbatches(rows, model):
            own = step.take((x, y, sample_weight), rows, part)
            with part:
                output, loss, grads = _forward_and_backward(model, part, weights, own)
            outputs.append(output)
            losses.append(loss * part.fraction)
            before = sums.get(part.pipeline)
            sums[part.pipeline] = (
                grads if before is None else [gradients.add(a, b) for a, b in zip(before, grads)]
            )
            sizes.append(part.end - part.first)
        step.finish_sums()
        y_pred = step.join(model.name, outputs, sizes)
        loss = tf.add_n(losses)
        model._loss_tracker.update_state(
            loss, sample_weight=tf.shape(next(i for i in tree.flatten(x) if i is not None))[0]
        )
        if weights:
            total = step.over_pipelines.total(weights, sums)
            model.optimizer.apply_gradients(zip(total, weights))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    return train_step


def _forward_and_backward(
    model: keras.Model, part: Microbatch, weights: list[keras.Variable], data: tuple[Any, Any, Any]
) -> tuple[Any, tf.Tensor, list[Any]]:
    """Outputs, loss, and gradients of a micro-batch, times its part of the batch's rows."""
    x, y, sample_weight = data
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        if any(get_keras_mask(leaf) is not None for leaf in tree.flatten(y_pred)):
            raise ValueError(
                f"The outputs of the model '{model.name}' have masks in training, by whose number "
                'of entries the loss of the batch is divided. Pass `schedule="gpipe"` to the '
                "strategy, which sees whole batches. Received: schedule='1f1b'"
            )
        # Keras counts means by rows where their number is known, and else by batches.
        step: Any = current_step()
        y_pred = tree.map_structure(step.as_the_batch, y_pred)
        loss = model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
        scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
    seed = tf.cast(part.fraction, scaled.dtype)
    return y_pred, loss, tape.gradient(scaled, weights, output_gradients=seed)
