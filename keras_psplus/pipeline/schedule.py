"""Schedules: order and times of what each stage does for which micro-batch.

A schedule is a function of the numbers of stages and micro-batches. It returns a list for each
stage, of pairs of a direction and the number of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
Actions = list[tuple[str, int]]


def gpipe(stages: int, microbatches: int) -> list[Actions]:
    """All forward, then all backward: a stage keeps the activations of all micro-batches.

    Reference: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", NeurIPS 2019.
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
    """
    last: dict[str, tuple[str, int]] = {}
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for action in actions:
        found[action] = list(last.values()) if action[0] == FORWARD else []
        last[action[0]] = action
    return found


# Simulation of a step's duration, from the order and times of stages' actions.


def makespan(
    orders: Sequence[Actions],
    forward: Sequence[float],
    backward: Sequence[float],
    by_inputs: float = 1.0,
) -> float:
    """The time from the first action of a step to the end of its last.

    Each stage does its actions in their order, each as soon as the stage before has sent its
    activations, or the stage after its gradients. What tensors take on their way is not counted.
    Gradients by inputs, for which the stage before waits, are there after the part `by_inputs` of
    the backward pass; those by weights come in the rest.
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
    """Number of micro-batches whose activations a stage keeps at once."""
    kept, most = 0, 0
    for direction, _ in order:
        kept += 1 if direction == FORWARD else -1
        most = max(most, kept)
    return most


# Seconds of stages' work and waits for links, by the moments of a step's actions.
#
# stage 0  [F0][F1]............[B0]   [B1]      [ ] work   . no work
#             sent |--> arrived
# stage 1      ....[F0 loss B0][F1 loss B1]     flight: sent to arrived


Action = tuple[str, int]
WORK, LINK, WAIT = "work", "link", "wait"


class Span(NamedTuple):
    """Work of a stage without a pause, by the clock of its machine.

    It has `arrived` with all that it begins with, `sent` what the next stage needs, and waits for
    the stage's actions `after`.
    """

    action: Action
    arrived: float
    sent: float
    ended: float
    after: frozenset[Action] = frozenset()


class Interval(NamedTuple):
    """Work, or a wait with or without a `LINK`, by the first stage's clock."""

    kind: str
    action: Action
    began: float
    ended: float


def work_and_links(stages: Sequence[Sequence[Interval]]) -> list[tuple[float, float]]:
    """Adds up seconds of work, and of waiting for links, by stage."""
    found = []
    for each in stages:
        seconds = {kind: 0.0 for kind in (WORK, LINK, WAIT)}
        for one in each:
            seconds[one.kind] += one.ended - one.began
        found.append((seconds[WORK], seconds[LINK]))
    return found


def intervals(stages: Sequence[Sequence[Span]]) -> list[list[Interval]]:
    """Computes what each stage does, from its first action to its last."""
    sent = [_latest(spans, "sent") for spans in stages]
    clocks = _clocks(stages, sent)
    found = []
    for number, spans in enumerate(stages):
        ends, timed = _latest(spans, "ended"), []
        for span in spans:
            begun = max([span.arrived, *(ends[a] for a in span.after if a in ends)])
            timed.append((min(begun, span.ended), span))
        own, clock = list[Interval](), clocks[number]
        until = min((begun for begun, _ in timed), default=0.0)
        for begun, span in sorted(timed, key=lambda pair: pair[0]):
            if number == len(stages) - 1 and span.action[0] == BACKWARD:
                # Its forward comes before, and the loss.
                begun = min(begun, until)
            left = max(until, _sent(sent, number, span.action, clocks))
            own += [
                Interval(WAIT, span.action, until - clock, min(begun, left) - clock),
                Interval(LINK, span.action, left - clock, min(begun, span.arrived) - clock),
                Interval(WORK, span.action, max(begun, until) - clock, span.ended - clock),
            ]
            until = max(until, span.ended)
        found.append([one for one in own if one.ended > one.began])
    return found


def _latest(spans: Sequence[Span], moment: str) -> dict[Action, float]:
    latest: dict[Action, float] = {}
    for span in spans:
        own = getattr(span, moment)
        latest[span.action] = max(own, latest.get(span.action, own))
    return latest


def _sent(
    sent: Sequence[Mapping[Action, float]], number: int, action: Action, clocks: Sequence[float]
) -> float:
    """Moment at which a neighbour had sent an action's inputs, by the stage's clock."""
    other = number - 1 if action[0] == FORWARD else number + 1
    if not 0 <= other < len(sent) or action not in sent[other]:
        return float("inf")
    return sent[other][action] - clocks[other] + clocks[number]


def _clocks(
    stages: Sequence[Sequence[Span]], sent: Sequence[Mapping[Action, float]]
) -> list[float]:
    """Differences of the clocks of the stages' machines to that of the first.

    Nothing arrives before it was sent: where it seems so, one way is taken to be as long as back.
    """
    clocks, arrived = [0.0], [_latest(spans, "arrived") for spans in stages]
    for one, other in itertools.pairwise(range(len(stages))):
        there = _shortest(sent[one], arrived[other], FORWARD)
        back = _shortest(sent[other], arrived[one], BACKWARD)
        late = 0.0
        if there is not None and back is not None and min(there, back) < 0:
            late = (there - back) / 2
        clocks.append(clocks[-1] + late)
    return clocks


def _shortest(
    sent: Mapping[Action, float], arrived: Mapping[Action, float], direction: str
) -> float | None:
    both = [a for a in arrived.keys() & sent.keys() if a[0] == direction]
    return min((arrived[a] - sent[a] for a in both), default=None)
