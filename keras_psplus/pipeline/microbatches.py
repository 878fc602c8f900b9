"""Micro-batches: batches that are cut and joined, and Keras's train step by them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.core.batch import batches
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.keras_internals.keras_parts import (
    BaseTrainer,
    TensorFlowTrainer,
    get_keras_mask,
    set_keras_mask,
    tree,
    unpack_x_y_sample_weight,
)
from keras_psplus.pipeline import boundary

# Number of rows of a batch, found before there is one.


def rows_of_spec(structure: Any) -> int | None:
    """Rows of a batch, by its first part that tells; None if none does."""
    shapes = [tuple(leaf.shape) for leaf in tree.flatten(structure) if _has_rank(leaf)]
    return next((shape[0] for shape in shapes if shape and shape[0]), None)


def rows_of_data(adapter: Any, dataset: tf.data.Dataset) -> int | None:
    """Rows of a full batch of `fit`'s data; None if it does not tell."""
    size = adapter.batch_size
    while size is None and dataset is not None:
        size = tf.get_static_value(getattr(dataset, "_batch_size", None))
        inputs = dataset._inputs()
        dataset = inputs[0] if len(inputs) == 1 else None
    return None if size is None else int(size)


def _has_rank(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and getattr(leaf.shape, "rank", True) is not None


def bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """First and one past the last row of each micro-batch; none is empty."""
    count = max(1, min(rows, count))
    edges = [-(-i * rows // count) for i in range(count + 1)]
    return list(zip(edges, edges[1:]))


def has_rows(leaf: Any) -> bool:
    return is_tensor(leaf) and bool(leaf.shape.rank)


def rows_of(structure: Any) -> int | None:
    """Number of rows of a batch; None if it is unknown, or there are none."""
    return next((leaf.shape[0] for leaf in tree.flatten(structure) if has_rows(leaf)), None)


def with_unknown_rows(leaf: Any) -> Any:
    """Clears the static number of a tensor's rows, by which Keras weights some means."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    shape = [None, *leaf.shape[1:]]

    @tf.custom_gradient
    def same(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        other = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)
        return other, lambda gradient: gradient

    other, mask = same(leaf), get_keras_mask(leaf)
    if mask is not None:
        set_keras_mask(other, with_unknown_rows(mask))
    return other


def cut(leaf: Any, first: int, end: int) -> Any:
    """Slices rows of a tensor, whose number is known from then on."""
    own = batches.take(leaf, first, end)
    if isinstance(own, tf.Tensor):
        own.set_shape([end - first, *own.shape[1:]])
    return own


def take(
    structure: Any,
    rows: int,
    first: int,
    end: int,
    rows_of_leaf: Callable[[Any], int | None],
    parts: Mapping[int, Any] = {},
) -> Any:
    """Slices a micro-batch from a structure: tensors with the batch's rows are cut.

    `parts` has, by ids of tensors, the micro-batch's parts of them that are known.
    """

    def part(leaf: Any) -> Any:
        if not has_rows(leaf) or rows_of_leaf(leaf) != rows:
            return leaf
        if id(leaf) in parts:
            return parts[id(leaf)]
        own, mask = cut(leaf, first, end), get_keras_mask(leaf)
        if mask is not None:
            set_keras_mask(own, cut(mask, first, end))
        return own

    return tree.map_structure(part, structure)


def join(name: str, parts: list[Any], sizes: Sequence[int]) -> Any:
    """Joins what the calls of a layer have returned, row by row."""
    if len(parts) == 1:
        return parts[0]

    def one(*leaves: Any) -> Any:
        if not is_tensor(leaves[0]):
            return leaves[0]
        for leaf, size in zip(leaves, sizes):
            if not leaf.shape.rank or leaf.shape[0] not in (None, size):
                raise ValueError(
                    f"The layer '{name}' is called with micro-batches, and must return tensors "
                    "with a row for each row that it is given. Reduce over rows in the loss, or "
                    f"pass `microbatches=1` to the strategy. Received: {leaf} for {size} rows"
                )
        joined = concat(leaves)
        masks = [get_keras_mask(leaf) for leaf in leaves]
        if all(mask is not None for mask in masks):
            set_keras_mask(joined, tf.concat(masks, 0))
        return joined

    return tree.map_structure(one, *parts)


def join_losses(
    layers: list[keras.Layer], found: list[list[list[tf.Tensor]]], sizes: Sequence[int]
) -> None:
    """Gives layers the losses of the batch, of those added for micro-batches.

    A loss is a mean over rows, as everywhere in Keras, and counts by the rows of its micro-batch.
    """
    rows = sum(sizes)
    for i, layer in enumerate(layers):
        own = [of_microbatch[i] for of_microbatch in found]
        layer._losses = [
            tf.add_n([loss * (size / rows) for loss, size in zip(losses, sizes)])
            for losses in zip(*own)
        ]


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (tf.Tensor, tf.SparseTensor, tf.RaggedTensor))


def concat(leaves: Sequence[Any]) -> Any:
    if len(leaves) == 1:
        return leaves[0]
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves))
    return tf.concat(list(leaves), 0)


class CutBatch(NamedTuple):
    """A cut batch: of each tensor with rows, a tuple of each pipeline's micro-batches."""

    rows: int
    leaves: list[Any]


def cut_batch(batch: Any, count: int, pipelines: int) -> CutBatch | None:
    """Cuts a batch, where it is; micro-batch `i` belongs to pipeline `i % pipelines`."""
    rows = rows_of(batch)
    if rows is None:
        return None
    places = bounds(rows, count * pipelines)

    def parts(leaf: Any) -> Any:
        if not _has_rows(leaf, rows):
            return leaf
        own = [[batches.take(leaf, *b) for b in places[i::pipelines]] for i in range(pipelines)]
        return tuple(concat(some) for some in own if some)

    return CutBatch(rows, [parts(leaf) for leaf in tree.flatten(batch)])


def join_batch(parts: CutBatch, structure: Any, count: int, step: Any) -> Any:
    """The batch again, in a function that is being traced.

    The step is told about the micro-batches: what only these need is not sent between pipelines.
    """
    places = bounds(parts.rows, count)

    def joined(leaf: Any) -> tuple[Any, list[Any] | None]:
        if not isinstance(leaf, tuple):
            return leaf, None
        pieces, first = [], [0] * len(leaf)
        for i, (begin, end) in enumerate(places):
            pipeline, size = i % len(leaf), end - begin
            piece = cut(leaf[pipeline], first[pipeline], first[pipeline] + size)
            first[pipeline] += size
            pieces.append(piece)
        return concat(pieces), pieces

    leaves = []
    for leaf in parts.leaves:
        whole, pieces = joined(leaf)
        if step.rows is not None:
            whole = with_unknown_rows(whole)
        if pieces is not None:
            step.note_parts(whole, pieces)
        leaves.append(whole)
    return tree.pack_sequence_as(structure, leaves)


def _has_rows(leaf: Any, rows: int) -> bool:
    return has_rows(leaf) and leaf.shape[0] == rows


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
                grads if before is None else [boundary.add(a, b) for a, b in zip(before, grads)]
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
    model: keras.Model, part: Any, weights: list[keras.Variable], data: tuple[Any, Any, Any]
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
