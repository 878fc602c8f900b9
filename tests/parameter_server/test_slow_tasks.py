"""A slow worker is named with its cause, and all tasks are in the trace."""

import json
import pathlib

import pytest
import tensorflow as tf

from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.parameter_server.context import WorkerTimes
from keras_psplus.parameter_server.queue import Run
from keras_psplus.parameter_server.traffic import (
    READ,
    SEND,
    CallCosts,
    Part,
    TrafficSummary,
    TransferTimer,
)
from tests.cluster.test_trace import check
from tests.support import jobs

JOB = pathlib.Path(__file__).with_name("slow_task_job.py")


@pytest.mark.processes
@pytest.mark.extended
def test_in_a_job(tmp_path):
    mode, cause = "sync", "compute"
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.json"
    flags = ["--workers=2", "--ps=2", f"--json_log={log}", f"--log_dir={tmp_path}/logs"]
    flags += [f"--trace={trace}", "--trace_steps=2", "--timeout=400"]
    output = jobs.launch(*flags, JOB, tmp_path, mode, cause, timeout=420)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("worker-1" in line["parts"] for line in lines if line["event"] == "steps")
    found = [line for line in lines if line["event"] == "step_times"]
    assert [line["epoch"] for line in found] == [1, 2]
    for line in found:
        assert (line["slowest"]["task"], line["slowest"]["cause"]) == ("worker-1", cause)
        slow, other = line["tasks"]["worker-1"], line["tasks"]["worker-0"]
        assert slow[f"{cause}_ms"] > other[f"{cause}_ms"]
        assert min(line["servers_ms"].values()) > 0 and len(line["servers_ms"]) == 2
        assert other["wait_ms"] > slow["wait_ms"]
        # The first step's function is traced, and does not count.
        assert slow["steps"] == other["steps"] == (9 if line["epoch"] == 1 else 10)
    assert "slowest: worker-1" in output and f"by {cause}" in output
    assert lines[-1]["goodput"]["training_s"] > 0 and "goodput" in output

    tasks = [f"{kind}-{i}" for kind in ("ps", "worker") for i in range(2)]
    spans = check(json.loads(trace.read_text()), ["chief-0", *tasks])
    assert {e["name"] for e in spans["ps-1"]} == {"read", "update"}
    for worker in ("worker-0", "worker-1"):
        names = {e["name"] for e in spans[worker]}
        assert {"step", "read", "compute", "send"} <= names
    assert "wait" in {e["name"] for e in spans["worker-0"]}


def costs(began, ended, read=0.0, send=0.0):
    parts = {Part(READ): read, Part(SEND): send, Part(READ, "ps-0"): read / 2}
    return CallCosts([], parts, began, ended)


def test_parts_of_an_asynchronous_step():
    progress = Progress()
    times = WorkerTimes(progress)
    for began in (10.0, 20.0):
        # The clock of the worker's machine is another one; calling it took half a second.
        call = costs(began + 1000, began + 1001.5, read=0.25, send=0.5)
        times.note_run(Run(1, began, began + 2), call, 1, test_in_a_job)
    times.note_read(1, 3.0)
    (name, found), *others = progress.times().items()
    # The first run of a function instantiates it, and does not count.
    assert (name, found.steps, others) == ("worker-1", 1, [])
    assert (found.seconds, found.link, found.reads) == (2.0, 1.25, 3.0)
    assert found.cause("compute") == 0.75 and found.cause("data") == 1.0
    assert found.servers == {"ps-0": 0.125}


def test_parts_of_a_synchronous_step():
    times = WorkerTimes(Progress())
    for began in (10.0, 20.0):
        for worker, seconds in enumerate((1.0, 4.0)):
            run = Run(worker, began, began + seconds)
            times.note_run(run, costs(began, run.ended), 1, test_in_a_job, is_open=True)
        times.end_step(computed=began + 4, updated=began + 5)
    early, late = (times.times()[f"worker-{i}"] for i in range(2))
    assert (early.wait, late.wait) == (3.0, 0.0)
    assert early.seconds == late.seconds == 5.0 and early.server == late.server == 1.0
    assert (early.cause("compute"), late.cause("compute")) == (1.0, 4.0)


def test_calls_of_the_chief():
    progress = Progress()
    times = WorkerTimes(progress)
    times.note_tracing()
    times.note_call(1, began=1.0, read=2.0)
    assert progress.times() == {}
    progress.begin_epoch()
    times.note_call(2, began=3.0, read=5.0)
    assert (progress.times()["chief-0"].data, progress.times()["chief-0"].host) == (2.0, 0.0)
    times.note_call(2, began=1e12, read=1e12)
    assert progress.times()["chief-0"].host > 0 and progress.times()["chief-0"].steps == 4


def test_a_clock_does_not_wait_for_what_else_the_step_does():
    found = []

    @tf.function(autograph=False)
    def step():
        timer = TransferTimer(lambda part, seconds: found.append(seconds))
        value = tf.raw_ops.Timestamp()
        timer.note_pull(value)
        # Stateful, as is the clock: TensorFlow has one run after the other.
        other = tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32)
        timer.end_of_pulls([value])
        return found[0], other

    graph = step.get_concrete_function().graph
    clocks = [op for op in graph.get_operations() if op.type == "Timestamp"]
    assert [op.type for op in clocks[-1].control_inputs] == ["AssignVariableOp"]


def test_seconds_in_branches_are_those_of_a_part():
    part = Part(SEND)
    summary = TrafficSummary({}, [part, ("a", "push", None)], [part, Part(READ)])
    call = summary.of_call([1.0, 0.0, 8.0, 4.0, 2.0, 0.5, 100.0, 104.0])
    assert summary.size == 8
    assert call.parts == {part: 3.0, Part(READ): 0.5} and call.seconds == 3.5
    assert (call.began, call.ended) == (100.0, 104.0)
    ((key, pair),) = call.traffic
    assert key == ("a", "push", None) and pair.tolist() == [8.0, 4.0]
