"""Batches concatenated into one tensor of each kind, to send fewer messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class JoinedBatches:
    """Batches end to end; as long as there are batches.

    Args:
        whole: Structure of tensors, as of a batch, but of the rows of all batches.
        rows: Int64 tensor: for each tensor of a batch, how many rows each batch has.
    """

    def __init__(self, whole: Any, rows: tf.Tensor) -> None:
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return self.rows.shape[1]

    @property
    def payload(self) -> dict[str, Any]:
        """Tensors that are sent, or stay on a worker."""
        return {"whole": self.whole, "rows": self.rows}


Batches = Sequence[Any] | JoinedBatches


def first_of(batches: Batches) -> Any:
    """The first batch of a list; all rows of joined batches."""
    return batches.whole if isinstance(batches, JoinedBatches) else batches[0]


def can_be_joined(batches: Sequence[Any]) -> bool:
    """Whether a list of batches is of several that fit end to end."""
    if len(batches) == 1:
        return False
    forms = [[_row_form(leaf) for leaf in tf.nest.flatten(batch)] for batch in batches]
    return None not in forms[0] and all(form == forms[0] for form in forms)


def _row_form(leaf: Any) -> tuple[tf.DType, list[int | None]] | None:
    is_dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank
    return (leaf.dtype, leaf.shape[1:].as_list()) if is_dense else None


def join(batches: Sequence[Any]) -> JoinedBatches:
    """Joins a list of batches that `can_be_joined`."""
    rows = np.transpose([[len(leaf) for leaf in tf.nest.flatten(batch)] for batch in batches])
    whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
    return JoinedBatches(whole, tf.constant(rows, tf.int64))


def spec_of(batches: JoinedBatches, batch_spec: Any) -> dict[str, Any]:
    """Type specification of the payload of joined batches."""
    return {
        "whole": tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batch_spec
        ),
        "rows": tf.TensorSpec(batches.rows.shape, tf.int64),
    }


def separate(payload: Any, batch_spec: Any) -> list[Any]:
    """The list of batches of a `JoinedBatches.payload`, or of a list of batches."""
    if not isinstance(payload, dict):
        return payload
    parts = []
    for i, (leaf, spec) in enumerate(
        zip(tf.nest.flatten(payload["whole"]), tf.nest.flatten(batch_spec))
    ):
        pieces = tf.split(leaf, payload["rows"][i], num=payload["rows"].shape[1])
        parts.append([tf.ensure_shape(piece, spec.shape) for piece in pieces])
    return [tf.nest.pack_sequence_as(payload["whole"], batch) for batch in zip(*parts)]
