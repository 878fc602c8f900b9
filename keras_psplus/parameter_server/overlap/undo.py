"""Undo of an update: values from before it, kept on the parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.parameter_server.transport import reads


class Undo:
    """Keeps the values of variables until the next update.

    A value and what is kept of it share their memory until an update writes to the variable: the
    servers have twice the bytes of these variables then.

    Args:
        parts: Variables, or shards, that an update writes to.
        prefix: Of the names of what is kept.
        on_chief: Function that makes a call of the chief out of a function that is traced.
    """

    def __init__(
        self,
        parts: Sequence[tf.Variable],
        prefix: str,
        on_chief: Callable[[Callable[[], Any]], Callable[[], Any]],
    ) -> None:
        self._parts, self._prefix = list(parts), prefix
        self.keep = on_chief(self._keep)
        self.restore = on_chief(self._restore)

    @property
    def handles(self) -> set[int]:
        """Ids of the handles of the variables."""
        return {id(part.handle) for part in self._parts}

    def _keep(self) -> tf.Tensor:
        for part in self._parts:
            with tf.device(part.device):
                tf.raw_ops.AssignVariableOp(resource=self._kept(part), value=reads.raw_read(part))
        return tf.constant(True)

    def _restore(self) -> tf.Tensor:
        for part in self._parts:
            with tf.device(part.device):
                value = tf.raw_ops.ReadVariableOp(resource=self._kept(part), dtype=part.dtype)
                tf.raw_ops.AssignVariableOp(resource=part.handle, value=value)
        return tf.constant(True)

    def _kept(self, part: tf.Variable) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(
            shape=part.shape,
            dtype=part.dtype,
            shared_name=f"{self._prefix}/before/{part._unique_id}",
        )
