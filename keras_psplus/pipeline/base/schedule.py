"""Schedules: what each stage does for which micro-batch, and in which order.

A schedule is a function of the numbers of stages and micro-batches. It returns a list for each
stage, of pairs of a direction and the number of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

FORWARD, BACKWARD = "forward", "backward"
Actions = list[tuple[str, int]]


def gpipe(stages: int, microbatches: int) -> list[Actions]:
    """All forward, then all backward: a stage keeps the activations of all micro-batches.

    Reference: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", NeurIPS 2019.

    Example:

    ```python
    gpipe(2, 2)[0]  # [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    ```
    """
    return [[(d, i) for d in (FORWARD, BACKWARD) for i in range(microbatches)]] * stages


def one_f_one_b(stages: int, microbatches: int) -> list[Actions]:
    """One forward, one backward: stage `k` keeps the activations of `stages - k` micro-batches.

    Three stages and four micro-batches, if a forward and a backward take one slot each (F0 is the
    forward of micro-batch 0, B0 its backward):

        slot     0  1  2  3  4  5  6  7  8  9 10 11
        stage 0 F0 F1 F2       B0 F3 B1    B2    B3
        stage 1    F0 F1    B0 F2 B1 F3 B2    B3
        stage 2       F0 B0 F1 B1 F2 B2 F3 B3

    1. Warm-up: stage `k` runs `stages - k` forwards, so that the last stage can start early.
    2. Steady state: each backward frees the activations that the next forward needs.
    3. Cool-down: the remaining backwards. All gradients are summed before the weights change.

    Reference: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
    SOSP 2019; "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021 (with a flush).

    Example:

    ```python
    one_f_one_b(1, 2)[0]  # [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    ```
    """
    return [
        _one_f_one_b_of_stage(min(stages - k, microbatches), microbatches) for k in range(stages)
    ]


def _one_f_one_b_of_stage(ahead: int, microbatches: int) -> Actions:
    actions = [(FORWARD, i) for i in range(ahead)]
    for i in range(microbatches):
        actions.append((BACKWARD, i))
        if i + ahead < microbatches:
            actions.append((FORWARD, i + ahead))
    return actions


ONE_F_ONE_B = "1f1b"
SCHEDULES: dict[str, Callable[[int, int], list[Actions]]] = {
    ONE_F_ONE_B: one_f_one_b,
    "gpipe": gpipe,
}
# The actions of "1f1b", with two batches under way.
PIPEDREAM = "pipedream"
NAMES = (*SCHEDULES, PIPEDREAM)


def before(actions: Actions) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """Actions that a stage must have done before each of its actions.

    A forward waits for the preceding forward and the preceding backward, which bounds how many
    micro-batches are kept. A backward waits for nothing but its gradients, which arrive in order:
    so the stage is busy while tensors are being sent.

    Args:
        actions: One stage's part of a schedule.
    """
    last: dict[str, tuple[str, int]] = {}
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for action in actions:
        found[action] = list(last.values()) if action[0] == FORWARD else []
        last[action[0]] = action
    return found
