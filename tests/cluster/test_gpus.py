"""GPUs of one machine, divided among its tasks."""

import pytest

from keras_psplus.cluster import environment
from keras_psplus.cluster.environment import plan_tasks

TWO = {"CUDA_VISIBLE_DEVICES": "4,GPU-5"}


def seen(environ=TWO, **kwargs):
    tasks = plan_tasks(environ=environ, **kwargs)
    return {task.name: task.variables.get("CUDA_VISIBLE_DEVICES") for task in tasks}


def test_workers_have_gpus_of_their_own_and_others_none():
    assert seen(workers=2, ps=1, evaluator=True) == {
        "worker-0": "4",
        "worker-1": "GPU-5",
        "ps-0": "",
        "evaluator-0": "",
    }
    assert seen(workers=1) == {"worker-0": "4,GPU-5"}
    # Under parameter servers each worker has one.
    assert seen(workers=1, ps=1, chief=True) == {"chief-0": "", "worker-0": "4", "ps-0": ""}
    # Under all-reduce a chief trains too.
    assert seen(workers=1, chief=True) == {"chief-0": "GPU-5", "worker-0": "4"}
    assert seen(workers=2, gpus_per_worker=0) == {"worker-0": "", "worker-1": ""}


def test_more_workers_share_gpus_and_grow():
    tasks = plan_tasks(workers=3, environ=TWO)
    variables = {task.name: task.variables for task in tasks}
    names = [own["CUDA_VISIBLE_DEVICES"] for own in variables.values()]
    assert names == ["4", "GPU-5", "4"]
    assert all(own["TF_FORCE_GPU_ALLOW_GROWTH"] == "true" for own in variables.values())
    said = environment.describe(variables)
    assert said == "3 tasks share GPU 4, GPU-5, and each takes the memory that it needs"


def test_nothing_is_set_where_there_are_none_or_on_other_hosts():
    for none in ("", "-1", "-1,0"):
        found = seen({"CUDA_VISIBLE_DEVICES": none}, workers=2)
        assert found == {"worker-0": None, "worker-1": None}
        tasks = plan_tasks(workers=2, environ={"CUDA_VISIBLE_DEVICES": none})
        assert environment.describe({task.name: task.variables for task in tasks}) == ""
    assert seen(workers=2, hosts=["a", "b"]) == {"worker-0": None, "worker-1": None}


def test_too_many_are_refused():
    message = "2 workers of 4 GPUs need 8, and this machine has 2. Received: --gpus_per_worker=4"
    with pytest.raises(ValueError, match=message):
        plan_tasks(workers=2, environ=TWO, gpus_per_worker=4)


def test_gpus_are_counted_by_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    environment._count.cache_clear()
    try:
        assert environment.visible({}) == ["0", "1"]
    finally:
        environment._count.cache_clear()
