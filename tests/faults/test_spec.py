"""The text that says which faults a job is to have."""

import pytest

from tests.lab.faults import Event, parse
from tests.support.tables import for_each

TASKS = ["chief-0", "worker-0", "worker-1", "ps-0"]


def test_events_are_read_in_the_order_of_their_steps():
    text = " slow:worker-1@step=50,factor=5,for=20; kill:worker1@step=20;stop:ps0@for=5,step=10;"
    text += "delay:ps0@step=60,ms=2.5;cut:worker0@step=70,for=2;"
    assert parse(text + "stop:chief@step=30", TASKS) == [
        Event("stop", "ps-0", 10, seconds=5.0),
        Event("kill", "worker-1", 20),
        Event("stop", "chief-0", 30),
        Event("slow", "worker-1", 50, seconds=20.0, factor=5.0),
        Event("delay", "ps-0", 60, ms=2.5),
        Event("cut", "worker-0", 70, seconds=2.0),
    ]


def test_what_is_shown_can_be_read_again():
    for text in (
        "kill:worker1@step=20",
        "preempt:worker1@step=20",
        "slow:ps0@step=5,factor=2.5,for=7",
        "stop:chief0@step=1",
        "cut:worker1@step=20,for=5",
        "delay:ps0@step=20,ms=50,for=10",
    ):
        (event,) = parse(text, TASKS)
        assert str(event) == text


def test_a_seed_draws_the_same_again_and_another_seed_something_else():
    texts = [f"kill:random@seed={seed}" for seed in range(40)]
    drawn = [parse(text, TASKS)[0] for text in texts]
    assert drawn == [parse(text, TASKS)[0] for text in texts]
    assert {event.task for event in drawn} == set(TASKS)
    assert len({event.step for event in drawn}) > 10
    assert all(1 <= event.step <= 100 and event.seed == i for i, event in enumerate(drawn))
    for event in (parse(f"{text},within=5", TASKS)[0] for text in texts):
        assert 1 <= event.step <= 5
    (event,) = parse("stop:random@seed=3,step=7,for=2", TASKS)
    assert (event.task, event.step, event.seconds) == (drawn[3].task, 7, 2.0)


@for_each(
    "text, problem",
    [
        ("", "There is no fault in it"),
        ("kill", "'kill' cannot be read"),
        ("kill:worker1@20", "'20' in 'kill:worker1@20' cannot be read"),
        ("end:worker1@step=2", "no fault 'end', only kill, preempt, stop, slow, cut, delay"),
        ("kill:worker7@step=2", "no task 'worker7', but chief0, worker0, worker1, ps0"),
        ("kill:worker1@for=2", "kill does not take 'for'"),
        ("stop:worker1@for=2", "`step` is missing"),
        ("kill:worker1@step=0", "`step` must be a whole number from 1 up, not '0'"),
        ("stop:worker1@step=1,for=nan", "`for` must be a number above 0, not 'nan'"),
        ("slow:worker1@step=1,factor=1", "`factor` must be a number above 1, not '1'"),
    ],
)
def test_errors_show_the_grammar(text, problem):
    with pytest.raises(ValueError) as caught:
        parse(text, TASKS)
    message = str(caught.value)
    assert problem in message
    assert "stop:ps0@step=10,for=5" in message
    assert message.endswith(f"Received: {text!r}")
