"""What the lab makes of its figures: ratios, tables, drawings."""

import json

import pytest
from lab import figures, meter, tables

CONTENT = {
    "machine": {"processor": "Z80", "cores": 2, "memory_gib": 4.0, "kernel": "6.1"},
    "versions": {"python": "3.11.2", "keras": "3.15.1"},
    "settings": {"links": "namespaces", "delay": 0.1, "ps": 2, "size": "full"},
}


def result(method, times=None, workers=2, turn=0, rate="100mbit", sent=1e6, **more):
    fields = {"turn": turn, "work": "dense", "workers": workers, "library": "torch", "load": 0.5}
    fields |= {
        "method": method,
        "rate": rate,
        "path": "alone" if method == "alone" else "all_reduce",
    }
    if times is None:
        return {**fields, "error": "log\nRuntimeError: gone", **more}
    both = {"sent": {"worker": sent}, "received": {"worker": sent}}
    return {
        **fields,
        "times": times,
        **both,
        "processor": {"worker": 7.0},
        "links": {"worker": [sent, sent]},
        **more,
    }


RESULTS = [
    result("alone", [10.0, 10.0, 10.0], rate="loopback", sent=0.0),
    result("ddp", [100.0, 120.0, 110.0], turn=0),
    result("ddp", [130.0, 140.0], turn=1, counted=0.9e6),
    result("ddp", [11.0], rate="loopback"),
    result("powersgd"),
]


def test_turns_are_pooled_and_compared():
    alone, ddp, unlimited, failed = figures.rows(RESULTS)
    assert alone.of_alone == alone.of_floor == 1.0
    assert (ddp.median, ddp.alone, ddp.floor) == (120.0, 10.0, 80.0)  # 1 MB at 100 Mbit/s
    assert (ddp.of_alone, ddp.of_floor, ddp.counted) == (12.0, 1.5, 0.9e6)
    assert ddp.low < 110 and ddp.high > 130
    assert unlimited.floor == 10.0 and unlimited.low == unlimited.high == 11.0
    assert failed.median is None and failed.of_alone is None and "gone" in failed.error
    # Without the run alone, times stay.
    assert figures.rows(RESULTS[1:2])[0].of_alone is None


def test_tables_between_racks():
    more = {"library": "keras_psplus", "workers": 4}
    results = [
        {**result("all_reduce", [100.0] * 3, uplink=3e6), **more},
        {**result("all_reduce_two_levels", [60.0] * 3, uplink=2e6), **more},
    ]
    settings = {**CONTENT["settings"], "racks": 2, "uplink": "100mbit"}
    content = {**CONTENT, "settings": settings, "results": results}
    pieces = tables.report(figures.rows(results), content)
    assert "in 2 racks that 100mbit joins" in pieces["conditions"]
    line = "| 4 | keras_psplus | `all_reduce_two_levels` | 100mbit | 60.0 | 0.60 | 2.000 | 0.67 |"
    assert line in pieces["dense"]


def test_tables():
    pieces = tables.report(figures.rows(RESULTS), {**CONTENT, "results": RESULTS})
    assert "Z80" in pieces["conditions"] and "keras 3.15.1" in pieces["conditions"]
    assert "busy" not in pieces["conditions"]
    busy = [{**result, "load": 9.0} for result in RESULTS]
    assert "busy" in tables.conditions({**CONTENT, "results": busy})
    lines = [line for line in pieces["dense"].splitlines() if line.startswith("| ")]
    times, sizes = lines[:4], lines[4:]
    assert len({line.count("|") for line in times}) == len({line.count("|") for line in sizes}) == 1
    cells = {line.split("`")[1]: [c.strip() for c in line.split("|")[3:-1]] for line in times[1:]}
    # The slowest rate first.
    assert cells["ddp"][:1] + cells["ddp"][2:4] == ["120.0", "12.00", "1.50"]
    assert cells["ddp"][4] == "11.0" and cells["alone"][0] == cells["alone"][4] == "10.0"
    assert cells["powersgd"][0] == "failed" and "gone" in pieces["failures"]
    assert "0.900" in sizes[1] and "1.000" in sizes[1] and len(sizes) == 2


def test_pieces_are_put_in_place():
    text = "A\n<!-- lab: dense -->\nold\n<!-- /lab: dense -->\nB\n"
    once = tables.put_in_place(text, {"dense": "new\n\nlines"})
    assert once.startswith("A\n") and once.endswith("B\n") and "old" not in once
    assert tables.put_in_place(once, {"dense": "new\n\nlines"}) == once
    with pytest.raises(ValueError, match="no place for 'sparse'"):
        tables.put_in_place(text, {"sparse": "x"})


def test_quality_is_compared_by_seed():
    def of(name, seed, accuracy, sent):
        return {"compression": name, "seed": seed, "accuracy": accuracy, "sent": sent}

    results = [of("none", 1, 0.9, 100.0), of("none", 2, 0.8, 100.0)]
    results += [of("int8", 2, 0.81, 25.0), of("sign", 3, 0.7, 3.0)]
    points = figures.learnt(results, "accuracy", lambda value, exact, _: 100 * (value - exact))
    assert points == {"int8": (4.0, pytest.approx(1.0))}


def test_meter_counts_whole_windows(monkeypatch, tmp_path, capsys):
    class Leader:
        asked, count = [], 0

        def set_rate(self, rate):
            self.asked.append(rate)

        def wait_for_others(self):
            assert (tmp_path / "ready-0").exists() and not self.asked

        def now(self):
            return self.count

        def by_job(self, before, after, steps):
            return {"sent": {"worker": (after - before) / steps}}

    monkeypatch.setenv("LAB_FOLDER", str(tmp_path))
    plan = {"name": "dense", "window": 4, "start": 2}
    plan["phases"] = [
        {"rate": "loopback", "warmup": 1, "windows": 3},
        {"rate": "1gbit", "warmup": 2, "windows": 1},
    ]
    leader = Leader()
    measured = meter.Meter(leader, 0, plan, lambda: 10 * leader.count)
    assert meter.windows(plan) == 9
    for _ in range(meter.windows(plan)):
        leader.count += 8  # two in each step
        measured.window_ended()
    assert leader.asked == ["loopback", "1gbit"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    first, second = (json.loads(line.removeprefix(meter.RESULT)) for line in lines)
    assert first["sent"] == second["sent"] == {"worker": 2.0} and first["counted"] == 20.0
    assert (first["rate"], len(first["times"])) == ("loopback", 3)
    assert (second["rate"], len(second["times"])) == ("1gbit", 1)


@pytest.mark.extended
def test_drawings_are_small_and_name_every_method(tmp_path):
    pytest.importorskip("matplotlib")
    from lab import plots

    results = []
    for workers in (2, 4):
        for number in range(30):
            times = [10.0 + number, 12.0 + number]
            results.append(result(f"method_{number}", times, workers))
        results.append(result("alone", [5.0], workers, rate="loopback", sent=0.0))
    rows = figures.rows([*results, *RESULTS])
    step_time, scaling, quality = (tmp_path / f"{name}.svg" for name in ("a", "b", "c"))
    assert plots.step_time(rows, "dense", 2, step_time)
    assert plots.scaling(rows, "dense", scaling)
    assert plots.quality({("Digits", "points"): {"method_1": (4.0, -0.1)}}, quality)
    for path in (step_time, scaling):
        assert all(f"method_{number}<" in path.read_text() for number in range(30))
    assert all(path.stat().st_size < 100_000 for path in (step_time, scaling, quality))
    assert not plots.step_time(rows, "sparse", 2, step_time)
    assert not plots.scaling(figures.rows(RESULTS), "dense", scaling)
    assert not plots.quality({("Digits", "points"): {}}, quality)
