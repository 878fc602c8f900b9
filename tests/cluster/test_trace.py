"""The Chrome trace of a job's tasks, merged."""

import json

from keras_psplus.cluster.monitor import trace
from keras_psplus.cluster.monitor.trace import Span, TraceRecorder


def check(chrome, tasks):
    """Spans of a trace are in order, nest and lie within their step; returns them by task."""
    events = chrome["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted(tasks)
    spans = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0 and all(e["dur"] >= 0 for e in spans)
    by_lane = {}
    for e in spans:
        by_lane.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for lane in by_lane.values():
        for began, ended in lane:
            for other, end in lane:
                # A tenth of a microsecond is lost by rounding.
                apart = end <= began + 0.3 or other >= ended - 0.3
                inside = began - 0.3 <= other and end <= ended + 0.3
                around = other - 0.3 <= began and ended <= end + 0.3
                assert apart or inside or around
    return {names[pid]: [e for e in spans if e["pid"] == pid] for pid in names}


def test_two_workers(tmp_path):
    for rank, arrives in enumerate((0.2, 0.6)):
        recorder = TraceRecorder(tmp_path, f"worker-{rank}", steps=2)
        for number in range(9):
            at = 100.0 + number
            spans = [Span("step", at, at + 1.0), Span("collective", at + arrives, at + 0.9)]
            if recorder.wants(f"worker-{rank}"):
                recorder.add(f"worker-{rank}", spans)
    # A start of the job that takes no step leaves what the one before it has recorded.
    TraceRecorder(tmp_path, "worker-1", steps=2)._write()
    found = check(trace.merge(tmp_path), ["worker-0", "worker-1"])
    first, second = found["worker-0"], found["worker-1"]
    # Three steps of warm-up come before.
    assert [e["args"]["step"] for e in first if e["name"] == "step"] == [1, 2]
    assert [(e["ts"], e["dur"]) for e in first if e["name"] == "wait"][0] == (200000.0, 400000.0)
    assert [e["dur"] for e in first if e["name"] == "send"] == [300000.0, 300000.0]
    assert "wait" not in [e["name"] for e in second]


def test_one_process_without_a_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv(trace.TRACE_VARIABLE, str(tmp_path / "trace.json"))
    monkeypatch.setenv(trace.TRACE_STEPS_VARIABLE, "1")
    trace.current.cache_clear()
    try:
        recorder = trace.current()
        for number in range(5):
            recorder.add("ps-0", [Span("update", number, number + 0.5, "for worker-1")])
    finally:
        trace.current.cache_clear()
    chrome = json.loads((tmp_path / "trace.json").read_text())
    (event,) = check(chrome, ["ps-0"])["ps-0"]
    assert event["dur"] == 500000.0
    names = [e["args"]["name"] for e in chrome["traceEvents"] if e["ph"] == "M"]
    assert names == ["ps-0", "for worker-1"]
