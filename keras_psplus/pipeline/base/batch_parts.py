"""Batches cut into parts, one per pipeline, so that no pipeline receives other rows."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from keras_psplus.core.batch import batches
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.pipeline.base import microbatches


class CutBatch(NamedTuple):
    """A batch that is cut.

    Attributes:
        leaves: For each tensor of the batch, a tuple of one tensor for each pipeline: the rows of
            its micro-batches. What has no rows is there as it is.
    """

    rows: int
    leaves: list[Any]


class PartNotes(Protocol):
    """Step that is given a batch in parts while it is traced: a `PipelineStep`."""

    rows: int | None

    def note_parts(self, leaf: tf.Tensor, parts: list[tf.Tensor]) -> None: ...


def cut(batch: Any, count: int, pipelines: int) -> CutBatch | None:
    """Cuts a batch, where it is.

    Args:
        batch: Structure of tensors.
        count: Number of micro-batches of each pipeline.
        pipelines: Number of pipelines. Micro-batch `i` belongs to pipeline `i % pipelines`.

    Returns:
        `CutBatch`; None if the number of rows is not known.
    """
    rows = microbatches.rows_of(batch)
    if rows is None:
        return None
    bounds = microbatches.bounds(rows, count * pipelines)

    def parts(leaf: Any) -> Any:
        if not _has_rows(leaf, rows):
            return leaf
        own = [[batches.take(leaf, *b) for b in bounds[i::pipelines]] for i in range(pipelines)]
        return tuple(microbatches.concat(some) for some in own if some)

    return CutBatch(rows, [parts(leaf) for leaf in tree.flatten(batch)])


def join(parts: CutBatch, structure: Any, count: int, step: PartNotes) -> Any:
    """The batch again, in a function that is being traced.

    Args:
        structure: A structure like the batch.
        count: Number of micro-batches of all pipelines.
        step: `PipelineStep`, which is told about the micro-batches: what only these need of a
            tensor is not sent from pipeline to pipeline.
    """
    bounds = microbatches.bounds(parts.rows, count)

    def joined(leaf: Any) -> tuple[Any, list[Any] | None]:
        if not isinstance(leaf, tuple):
            return leaf, None
        pieces, first = [], [0] * len(leaf)
        for i, (begin, end) in enumerate(bounds):
            pipeline, size = i % len(leaf), end - begin
            piece = microbatches.cut(leaf[pipeline], first[pipeline], first[pipeline] + size)
            first[pipeline] += size
            pieces.append(piece)
        return microbatches.concat(pieces), pieces

    leaves = []
    for leaf in parts.leaves:
        whole, pieces = joined(leaf)
        if step.rows is not None:
            whole = microbatches.with_unknown_rows(whole)
        if pieces is not None:
            step.note_parts(whole, pieces)
        leaves.append(whole)
    return tree.pack_sequence_as(structure, leaves)


def _has_rows(leaf: Any, rows: int) -> bool:
    return microbatches.has_rows(leaf) and leaf.shape[0] == rows
