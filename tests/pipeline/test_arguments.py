"""What the constructor and `stage` refuse, before anything starts."""

import json

import keras
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.pipeline import strategy as arguments
from tests.support.tables import for_each


@for_each(
    "options, message",
    [
        ({"microbatches": 0}, "microbatches"),
        ({"microbatches": 2.5}, "microbatches"),
        ({"microbatches": True}, "microbatches"),
        ({"stages": "even"}, "`stages` must be"),
        ({"stages": []}, "`stages` must be"),
        ({"stages": [[]]}, "`stages` must be"),
        ({"stages": [[1], ["a"]]}, "`stages` must be"),
        ({"stages": 2}, "`stages` must be"),
        ({"schedule": "2f2b"}, "`schedule` must be one of"),
        ({"schedule": ["gpipe"]}, "`schedule` must be one of"),
        ({"activation_compression": "topk:0.1"}, "activation_compression"),
        ({"activation_compression": 8}, "activation_compression"),
        ({"startup_timeout": 0}, "startup_timeout"),
        ({"heartbeat_timeout": "long"}, "heartbeat_timeout"),
        ({"stall_warning": -1}, "stall_warning"),
        ({"recompute": "yes"}, "`recompute`"),
        ({"pipelines": 0}, "pipelines"),
        ({"pipelines": 1.5}, "pipelines"),
        (
            {"pipelines": 3},
            r"1 workers or devices cannot be divided over 3 pipelines.*start 3 work",
        ),
        ({"compression": "int8"}, "there is one pipeline"),
        ({"pipelines": 2, "compression": "int9"}, '`compression` must be None, "bf16", "fp16"'),
        *(
            ({"pipelines": 2, "compression": given}, '`compression` casts .* must be None, "bf16"')
            for given in ("int8", {"*": "sign"}, psp.compression.Cast(error_feedback=True))
        ),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}.*Received: "):
        psp.PipelineStrategy(**options)


def test_stages_for_which_there_are_no_workers_are_refused():
    with pytest.raises(ValueError, match="describes 2 stages, and there are 3.*Received: stages="):
        arguments.check_count([["a"], ["b"]], 3)
    with pytest.raises(ValueError, match="start 2 or 4 workers.*Received: pipelines=2"):
        arguments.check_count(None, 3, 2)
    with pytest.raises(ValueError, match="2 stages, and there are 6.*of each of the 2 pipelines"):
        arguments.check_count([["a"], ["b"]], 6, 2)
    arguments.check_count([["a"], ["b"]], 4, 2)
    assert arguments.check_stages(["a", ["b", "c*"]]) == [["a"], ["b", "c*"]]


@for_each(
    "cluster, message",
    [
        ({"worker": ["localhost:1", "localhost:2"]}, "at least one `chief` task"),
        ({"chief": ["localhost:1"]}, "at least one `worker` task"),
        (
            {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]},
            "has no parameter servers",
        ),
    ],
)
def test_another_kind_of_cluster_is_refused(cluster, message, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", first_task(cluster, "chief" if "chief" in cluster else "worker")
    )
    with pytest.raises(ClusterConfigError, match=f"{message}.*Received: "):
        psp.PipelineStrategy()


def first_task(cluster, job):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})


def test_a_cluster_that_does_not_fit_is_refused_on_every_task(monkeypatch):
    cluster = {"chief": ["localhost:1"], "worker": [f"localhost:{i}" for i in (2, 3, 4)]}
    monkeypatch.setenv("TF_CONFIG", first_task(cluster, "worker"))
    with pytest.raises(ValueError, match="3 workers or devices cannot be divided over 2 pipelines"):
        psp.PipelineStrategy(pipelines=2)


@for_each("number", [-1, 1, "first", True, 0.0])
def test_a_stage_that_is_not_there_is_refused(number):
    strategy = psp.PipelineStrategy()
    assert strategy.num_stages == 1
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"has the stages 0 to 0\. Received: "),
        psp.stage(number),
    ):
        pass


def test_under_other_strategies_a_stage_is_nothing():
    with psp.stage(7):
        layer = keras.layers.Dense(1)
    assert layer(tf.ones((1, 1))).shape == (1, 1)
