"""Work of stages, and waits for links, from the moments of a step."""

import pytest

from keras_psplus.pipeline import schedule
from keras_psplus.pipeline.schedule import LINK, WAIT, WORK, Span, intervals, work_and_links


def seconds(stages):
    """Seconds of work and of links of each stage, of its spans."""
    return work_and_links(intervals(stages))


def run(forward, backward, flight=0.0, clocks=(0.0, 0.0, 0.0), microbatches=4, loss=0.0):
    """Spans of a step in which each stage is as fast as it can be."""
    count = len(forward)
    orders = schedule.one_f_one_b(count, microbatches)
    before = [schedule.before(order) for order in orders]
    sent, found, done = {}, [[] for _ in orders], [0] * count
    at = [0.0] * count
    while any(done[k] < len(order) for k, order in enumerate(orders)):
        for k, order in enumerate(orders):
            while done[k] < len(order):
                action = direction, turn = order[done[k]]
                is_forward = direction == schedule.FORWARD
                giver = (k - 1 if is_forward else k + 1), action
                if is_forward and k == 0:
                    arrived = 0.0
                elif not is_forward and k == count - 1:
                    arrived = sent[k, ("forward", turn)] + loss
                elif giver in sent:
                    arrived = sent[giver] + flight
                else:
                    break
                begun = max(arrived, at[k])
                at[k] = begun + (forward if is_forward else backward)[k]
                sent[k, action] = at[k]
                times = [moment + clocks[k] for moment in (arrived, at[k], at[k])]
                found[k].append(Span(action, *times, frozenset(before[k][action])))
                done[k] += 1
    return found


def test_work_is_that_of_each_stage_whatever_it_waits_for():
    for microbatches in (1, 4, 8):
        found = seconds(run([1, 3, 1], [2, 6, 2], 0.0, microbatches=microbatches))
        for (work, link), each in zip(found, (3, 9, 3)):
            assert work == pytest.approx(each * microbatches) and link == 0


def test_time_for_the_loss_is_work_of_the_last_stage():
    (first, _), (last, _) = seconds(run([1, 1], [1, 1], loss=2.0))
    assert first == pytest.approx(8) and last == pytest.approx(16)


def test_a_flight_counts_as_far_as_a_stage_has_nothing_to_do():
    found = seconds(run([1, 1], [1, 1], flight=3.0))
    assert all(work == pytest.approx(8) for work, _ in found)
    assert [link for _, link in found] == pytest.approx([7, 3])
    # A stage that works all the time waits for nothing.
    (_, link), _ = seconds(run([9, 1], [9, 1], flight=1.0, microbatches=8))
    assert link == 0


@pytest.mark.parametrize("ahead", [50.0, -50.0])
def test_clocks_of_machines_may_differ(ahead):
    plain = seconds(run([1, 2, 1], [2, 4, 2], flight=0.5))
    other = seconds(run([1, 2, 1], [2, 4, 2], flight=0.5, clocks=(0.0, ahead, 3 * ahead)))
    for found, expected in zip(other, plain):
        assert found == pytest.approx(expected)


def test_spans_of_one_stage_that_overlap_count_once():
    spans = [
        Span(("forward", 0), 0.0, 2.0, 2.0),
        Span(("forward", 0), 1.0, 3.0, 3.0),
        Span(("forward", 1), 0.0, 5.0, 5.0, frozenset({("forward", 0)})),
    ]
    assert seconds([spans]) == [(5.0, 0.0)]
    assert seconds([[]]) == [(0.0, 0.0)]


def test_intervals_are_of_one_clock_and_without_a_gap():
    plain = intervals(run([1, 2, 1], [2, 4, 2], flight=0.5))
    other = intervals(run([1, 2, 1], [2, 4, 2], flight=0.5, clocks=(0.0, 50.0, -50.0)))
    for stage, same in zip(plain, other):
        assert [one[:2] for one in stage] == [one[:2] for one in same]
        for one, own in zip(stage, same):
            assert one[2:] == pytest.approx(own[2:])
        assert [one.ended for one in stage[:-1]] == [one.began for one in stage[1:]]
    # The first stage waits while the others work, and then for what they have sent.
    kinds = [one.kind for one in plain[0]]
    assert kinds[kinds.index(WAIT) + 1] == LINK and WORK in kinds
