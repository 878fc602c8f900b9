"""Clusters that stay up: what goes wrong in a case is seen."""

import os

import pytest

from tests.support.cluster import run

pytestmark = pytest.mark.processes


def of_one_worker_alone():
    import tensorflow as tf

    if tf.distribute.get_strategy().task.name == "worker-1":
        raise ValueError("on one worker")
    return {}


def wrong_everywhere():
    raise ValueError("everywhere")


def process():
    return {"pid": os.getpid()}


def test_a_case_that_fails_everywhere_leaves_the_cluster():
    before = run("ar2", process, same=False)
    with pytest.raises(AssertionError, match="ValueError: everywhere"):
        run("ar2", wrong_everywhere)
    assert run("ar2", process, same=False) == before
    with pytest.raises(AssertionError, match="differs in pid"):
        run("ar2", process)


def test_a_case_on_which_tasks_differ_ends_the_cluster():
    before = run("ar2", process, same=False)
    with pytest.raises(AssertionError, match="Tasks differ"):
        run("ar2", of_one_worker_alone)
    # The next case starts another one.
    for found in before.values():
        with pytest.raises(ProcessLookupError):
            os.kill(int(found["pid"]), 0)
