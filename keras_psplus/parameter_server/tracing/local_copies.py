"""Workers' copies of variables: those in use, and writes that make them old.

Inside a context of `handles` a variable's handle is that of the worker's copy: reads, the tape and
optimizers' updates use the copy, and nothing is sent to the server. Copies that overlapping steps
read are as old as the last step: they do not include values that a callback, a checkpoint or the
script assigns between steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from keras_psplus.core.base.thread_value import ThreadFlag, ThreadValue

# Dict from ids of variables to handles, of a step that a worker takes alone.
handles: ThreadValue[Mapping[int, tf.Tensor]] = ThreadValue()
# Raised by a thread while an optimizer is given the sums of a global step.
applying_sums_flag = ThreadFlag()


def handle_of(variable: tf.Variable) -> tf.Tensor | None:
    """The handle of the worker's copy of a variable, or None."""
    return (handles() or {}).get(id(variable))


class ChiefWrites:
    """Counts writes of this process.

    Attributes:
        count: Grows with each that is made eagerly, and with each update.
        are_traced: Whether a function of the script writes, which may be called at any time.
    """

    def __init__(self) -> None:
        self.count, self.are_traced = 0, False

    def note(self) -> None:
        """Notes that a variable is assigned to, eagerly or in a traced function."""
        if applying_sums_flag:
            return
        if tf.executing_eagerly():
            self.count += 1
        else:
            self.are_traced = True


writes = ChiefWrites()
