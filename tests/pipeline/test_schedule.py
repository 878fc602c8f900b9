"""Schedules: complete, without a deadlock, and with as few micro-batches kept as they promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.pipeline import schedule

SIZES = st.integers(1, 8), st.integers(1, 20)
PEAKS = {
    "gpipe": lambda stages, microbatches, stage: microbatches,
    "1f1b": lambda stages, microbatches, stage: min(stages - stage, microbatches),
}


def needed(action, stage, stages):
    """What other stages have to have done before an action."""
    direction, number = action
    if direction == schedule.FORWARD:
        return [(stage - 1, action)] if stage else []
    own = [(stage, (schedule.FORWARD, number))]
    return own + ([(stage + 1, action)] if stage + 1 < stages else [])


def run(orders, waits):
    """Does all actions that can be done, again and again; returns those that were done."""
    done, left = set(), [list(order) for order in orders]
    while True:
        ready = [
            (stage, action)
            for stage, order in enumerate(left)
            for action in order
            if all(one in done for one in needed(action, stage, len(orders)))
            and all((stage, one) in done for one in waits(stage, action))
        ]
        if not ready:
            return done
        for stage, action in ready:
            left[stage].remove(action)
            done.add((stage, action))


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@given(*SIZES)
def test_every_forward_and_backward_is_there_once(name, stages, microbatches):
    orders = schedule.SCHEDULES[name](stages, microbatches)
    assert len(orders) == stages
    directions = (schedule.FORWARD, schedule.BACKWARD)
    expected = {(direction, i) for direction in directions for i in range(microbatches)}
    for order in orders:
        assert len(order) == len(expected)
        assert set(order) == expected


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@given(*SIZES)
def test_it_comes_to_its_end(name, stages, microbatches):
    orders = schedule.SCHEDULES[name](stages, microbatches)
    every = {(stage, action) for stage, order in enumerate(orders) for action in order}
    # One after the other, as they stand; and by what each waits for alone.
    strict = [dict(zip(order[1:], order)) for order in orders]
    assert run(orders, lambda s, a: [strict[s][a]] if a in strict[s] else []) == every
    before = [schedule.before(order) for order in orders]
    assert run(orders, lambda s, a: before[s][a]) == every


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@given(*SIZES)
def test_no_more_microbatches_are_kept_than_promised(name, stages, microbatches):
    for stage, order in enumerate(schedule.SCHEDULES[name](stages, microbatches)):
        kept, most = 0, 0
        for direction, _ in order:
            kept += 1 if direction == schedule.FORWARD else -1
            most = max(most, kept)
        assert most == PEAKS[name](stages, microbatches, stage)
        # A forward waits for the backward that makes room for it, whatever else is done before.
        before = schedule.before(order)
        for action in order:
            backwards = [n for direction, n in before[action] if direction == schedule.BACKWARD]
            if action[0] == schedule.FORWARD and name == "1f1b" and action[1] >= most:
                assert backwards == [action[1] - most]
