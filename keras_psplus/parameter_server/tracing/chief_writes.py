"""Detection of writes to parameter servers' variables outside of a runner's steps.

Workers' copies of variables are as old as the last step. They do not include values that a
callback, a checkpoint or the script assigns between steps.
"""

import tensorflow as tf

from keras_psplus.core.base.thread_value import ThreadFlag

# Raised by a thread while an optimizer is given the sums of a global step.
applying_sums_flag = ThreadFlag()


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
