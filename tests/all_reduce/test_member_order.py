"""TensorFlow's order of the tasks of a group, which is not that of ranks with eleven workers."""

import pathlib

from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.all_reduce.collectives import operations
from keras_psplus.cluster import TaskConfig
from keras_psplus.cluster.testing import run_in_processes

JOB = pathlib.Path(__file__).with_name("member_order_job.py")


def test_tasks_are_in_the_order_of_their_names_as_text():
    workers = tuple(f"h{i}:1" for i in range(11))
    task = TaskConfig({"chief": ("c:1",), "worker": workers, "ps": ("p:1",)}, "worker", 0)
    names = operations.names_of(task, 1)
    assert names[:2] == ["/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0"]
    assert operations.ranks_by_place(names) == [0, 1, 2, 11, *range(3, 11)]
    twice = operations.names_of(task, 2)
    assert operations.ranks_by_place(twice)[2:8] == [2, 3, 4, 5, 22, 23]


@given(st.lists(st.integers(0, 300), unique=True, min_size=1))
def test_places_and_ranks_are_inverse(tasks):
    names = [f"task:{task}" for task in sorted(tasks)]
    ranks, places = operations.ranks_by_place(names), operations.places_by_rank(names)
    assert [ranks[place] for place in places] == list(range(len(names)))
    if max(tasks) < 10:
        assert ranks == places == list(range(len(names)))


def test_collectives_are_in_rank_order(tmp_path):
    """By the tasks of a cluster of eleven that stand the other way round in TensorFlow."""
    options = {"args": [tmp_path], "env": {"CUDA_VISIBLE_DEVICES": ""}}
    logs = run_in_processes(JOB, workers=3, timeout=560, **options).logs
    assert all("as expected" in log for log in logs.values()), logs
