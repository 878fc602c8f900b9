"""How long steps take by a schedule, and what is kept meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.pipeline import schedule

TIMES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@given(TIMES, st.integers(1, 12))
def test_no_step_is_shorter_than_its_bounds(name, times, microbatches):
    orders = schedule.SCHEDULES[name](len(times), microbatches)
    forward, backward = zip(*times)
    found = schedule.makespan(orders, forward, backward)
    # The busiest stage; one micro-batch's way; and no more than one after the other.
    assert found >= max(microbatches * (f + b) for f, b in times)
    assert found >= sum(forward) + sum(backward)
    assert found <= microbatches * (sum(forward) + sum(backward))


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 9), st.integers(1, 9))
def test_balanced_stages_wait_for_the_ends_alone(name, stages, microbatches, forward, backward):
    orders = schedule.SCHEDULES[name](stages, microbatches)
    found = schedule.makespan(orders, [forward] * stages, [backward] * stages)
    assert found == (microbatches + stages - 1) * (forward + backward)


@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 9), st.integers(1, 9))
def test_gradients_by_weights_fill_what_was_waited_for(stages, microbatches, forward, half):
    orders = schedule.one_f_one_b(stages, microbatches)
    found = schedule.makespan(orders, [forward] * stages, [2 * half] * stages, by_inputs=0.5)
    assert found >= microbatches * (forward + 2 * half)
    # The ends are shorter by one half for each stage; what is between them is not longer.
    assert found <= microbatches * (forward + 2 * half) + (stages - 1) * (forward + half)


def test_stages_that_wait_for_each_other_are_refused():
    orders = [[("backward", 0), ("forward", 0)], [("forward", 0), ("backward", 0)]]
    with pytest.raises(ValueError, match="wait for each other.*Received: "):
        schedule.makespan(orders, [1, 1], [1, 1])


def test_kept_microbatches():
    assert [schedule.most_kept(one) for one in schedule.gpipe(3, 5)] == [5, 5, 5]
    assert [schedule.most_kept(one) for one in schedule.one_f_one_b(3, 5)] == [3, 2, 1]
