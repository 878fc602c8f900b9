"""Answers to the requests of one worker that others wait for as well."""

from keras_psplus.sharding import store
from tests.support.tables import for_each

OWN = {"variable": 3, "steps": 5, "writes": 1}


@for_each(
    "other, is_answer",
    [
        ({}, True),
        # What is newer will do, and what is older will not.
        ({"steps": 6, "writes": 2}, True),
        ({"steps": 4}, False),
        ({"writes": 0}, False),
        ({"variable": 4}, False),
        # Of what one gives, nothing is gathered.
        ({"gives": True}, False),
    ],
)
def test_a_read_is_answered_by_another_workers(other, is_answer):
    assert store.is_answered(OWN, 0, {"by": 1} | OWN | other) is is_answer


@for_each("own", [{**OWN, "gives": True}, {"left": True}])
def test_other_requests_are_answered_by_themselves(own):
    assert store.is_answered(own, 1, {"by": 1} | own)
    assert not store.is_answered(own, 0, {"by": 1} | own)
    assert not store.is_answered(own, 1, {"by": 1, "released": [2]})
    assert not store.is_answered(OWN, 1, {"by": 1, "released": [2]})
