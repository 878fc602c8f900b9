"""Steps of each worker alone, and averages of their weights from time to time."""

from keras_psplus.arguments import flag, whole_number
from keras_psplus.updates.base import Context, Updates
from keras_psplus.updates.local_steps import LocalSteps


class LocalSGD(Updates):
    """Each worker steps alone; every some steps, weights are averaged over the workers.

    A worker's weights count in the average by the rows that it has trained on since the last one.

    Args:
        every: Steps between two averages.
        start_step: Before this step gradients are averaged at every step, as without `updates`
            (post-local SGD).
        average_slots: Whether the optimizer's momenta and the like are averaged as well. Otherwise
            each worker keeps its own.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.LocalSGD(8, start_step=1000)
    )
    ```

    Reference: [Stich, 2018](https://arxiv.org/abs/1805.09767);
    [Lin et al., 2018](https://arxiv.org/abs/1808.07217) for `start_step`.
    """

    local = True
    on_parameter_servers = True
    # Everything at once, as soon as it is due.
    fragments, overlap_steps, alpha = 1, 0, 0.0

    def __init__(self, every: int, start_step: int = 0, average_slots: bool = False) -> None:
        self.every = whole_number("every", every, 1)
        self.start_step = whole_number("start_step", start_step, 0)
        self.average_slots = flag("average_slots", average_slots)

    def on_replica(self, context: Context) -> LocalSteps:
        return LocalSteps(self, context)
