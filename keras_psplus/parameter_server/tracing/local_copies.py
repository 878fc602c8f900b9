"""Variables of parameter servers replaced by a worker's copies while a step is traced.

Inside a context of `handles` a variable's handle is that of the worker's copy: reads, the tape and
optimizers' updates use the copy, and nothing is sent to the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from keras_psplus.core.base.thread_value import ThreadValue

if TYPE_CHECKING:
    import tensorflow as tf

# Dict from ids of variables to handles, of a step that a worker takes alone.
handles: ThreadValue[Mapping[int, tf.Tensor]] = ThreadValue()


def handle_of(variable: tf.Variable) -> tf.Tensor | None:
    """The handle of the worker's copy of a variable, or None."""
    return (handles() or {}).get(id(variable))
