"""Gradients of several batches, sent and applied as one."""

from keras_psplus.arguments import flag, whole_number
from keras_psplus.updates.accumulation import Accumulation
from keras_psplus.updates.base import Context, Updates


class Accumulate(Updates):
    """Sums gradients on each worker for some batches, then sends them once and updates once.

    An update equals one on a batch of all their rows: the gradient is the mean over all rows, also
    if batches are uneven. The optimizer's iterations, learning-rate schedules, clipping and moving
    averages go by updates.

    Args:
        steps: Batches for each update.
        flush: Whether the end of an epoch updates with what there is. Otherwise the next epoch
            carries on.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.Accumulate(4)
    )
    ```

    Reference: [Ott et al., 2018](https://arxiv.org/abs/1806.00187), section 3.2.
    """

    on_parameter_servers = True

    def __init__(self, steps: int, flush: bool = False) -> None:
        self.steps = whole_number("steps", steps, 1)
        self.flush = flag("flush", flush)

    def on_replica(self, context: Context) -> Accumulation:
        return Accumulation(self.steps, context)
