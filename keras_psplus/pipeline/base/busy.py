"""Seconds of stages' work and waits for links, by the moments of a step's actions.

stage 0  [F0][F1]............[B0]   [B1]      [ ] work   . no work
            sent |--> arrived
stage 1      ....[F0 loss B0][F1 loss B1]     flight: sent to arrived
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_psplus.pipeline.base.schedule import BACKWARD, FORWARD

Action = tuple[str, int]
WORK, LINK, WAIT = "work", "link", "wait"


class Span(NamedTuple):
    """Work of a stage without a pause, by the clock of its machine.

    Attributes:
        action: Direction and number of the micro-batch.
        arrived: When all that it begins with was there.
        sent: When what the next stage needs was there.
        ended: When all was done.
        after: Actions of the stage that it waits for.
    """

    action: Action
    arrived: float
    sent: float
    ended: float
    after: frozenset[Action] = frozenset()


class Interval(NamedTuple):
    """Something that a stage does, by the clock of the first stage's machine.

    Attributes:
        kind: `WORK`; `LINK`, if what it waits for is on its way; or `WAIT`, if it is not.
        action: The action that is done, or waited for.
        began, ended: When.
    """

    kind: str
    action: Action
    began: float
    ended: float


def work_and_links(stages: Sequence[Sequence[Interval]]) -> list[tuple[float, float]]:
    """Adds up seconds of work, and of waiting for links, by stage.

    Args:
        stages: What `intervals` returns.

    Example:

    ```python
    first = Span(("forward", 0), arrived=0.0, sent=1.0, ended=1.0)
    then = Span(("forward", 0), arrived=3.0, sent=4.0, ended=4.0)
    last = Span(("forward", 1), arrived=6.5, sent=7.0, ended=7.0)
    stages = [[first, first._replace(action=("forward", 1), sent=5.0)], [then, last]]
    work_and_links(intervals(stages))[1]
    # (1.5, 1.5): between 4 and 6.5 s, the second micro-batch was on its way from 5 s on
    ```
    """
    found = []
    for each in stages:
        seconds = {kind: 0.0 for kind in (WORK, LINK, WAIT)}
        for one in each:
            seconds[one.kind] += one.ended - one.began
        found.append((seconds[WORK], seconds[LINK]))
    return found


def intervals(stages: Sequence[Sequence[Span]]) -> list[list[Interval]]:
    """Computes what each stage does, from its first action to its last.

    Args:
        stages: For each stage of a pipeline, its spans in a step.
    """
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
    """Latest moment of each action's spans, of those that `Span` has."""
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
