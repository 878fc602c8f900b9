"""Simulation of a step's duration, from the order and times of stages' actions."""

from __future__ import annotations

from collections.abc import Sequence

from keras_psplus.pipeline.base.schedule import FORWARD, Actions


def makespan(
    orders: Sequence[Actions],
    forward: Sequence[float],
    backward: Sequence[float],
    by_inputs: float = 1.0,
) -> float:
    """The time from the first action of a step to the end of its last.

    Each stage does its actions in their order, each as soon as the stage before has sent its
    activations, or the stage after its gradients. What tensors take on their way is not counted.

    Args:
        orders: For each stage, its part of a schedule.
        forward: For each stage, how long it takes for one micro-batch forward.
        backward: The same backward.
        by_inputs: The part of the backward pass after which gradients by inputs are there, for
            which the stage before waits; gradients by weights come in the rest.

    Returns:
        Time, in the unit of the arguments.

    Raises:
        ValueError: If stages wait for each other.

    Example:

    ```python
    makespan(schedule.gpipe(2, 4), [1, 1], [2, 2])  # (4 + 2 - 1) * (1 + 2) = 15
    ```
    """
    last = len(orders) - 1
    ends: dict[tuple[int, str, int], float] = {}
    at, done = [0.0] * len(orders), [0] * len(orders)
    while any(number < len(order) for number, order in zip(done, orders)):
        before = sum(done)
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                direction, number = order[done[stage]]
                if direction == FORWARD:
                    needed = (stage - 1, direction, number) if stage else None
                elif stage < last:
                    needed = stage + 1, direction, number
                else:
                    needed = stage, FORWARD, number
                if needed is not None and needed not in ends:
                    break
                start = max(at[stage], 0.0 if needed is None else ends[needed])
                takes = (forward if direction == FORWARD else backward)[stage]
                at[stage] = start + takes
                sent = takes if direction == FORWARD else by_inputs * takes
                ends[stage, direction, number] = start + sent
                done[stage] += 1
        if sum(done) == before:
            raise ValueError(f"The stages of a schedule wait for each other. Received: {orders}")
    return max(at)


def most_kept(order: Actions) -> int:
    """Of how many micro-batches a stage keeps activations at once.

    Args:
        order: Its part of a schedule.

    Example:

    ```python
    [most_kept(order) for order in schedule.one_f_one_b(3, 8)]  # [3, 2, 1]
    ```
    """
    kept, most = 0, 0
    for direction, _ in order:
        kept += 1 if direction == FORWARD else -1
        most = max(most, kept)
    return most
