"""Evaluation of a file's figures by pure functions: medians, spreads and ratios."""

import dataclasses
import itertools
import statistics

from keras_psplus import planning
from lab import wire


@dataclasses.dataclass(frozen=True)
class Row:
    """One method's figures for one work, number of workers and rate, over all turns.

    Attributes:
        median: Milliseconds of a step; None if the method failed.
        low: Its tenth percentile.
        high: Its ninetieth percentile.
        alone: Milliseconds of a step of the same library without communication, or None.
        floor: Milliseconds below which a step cannot be, or None.
        bytes: Dict from what is counted (`sent`, `received`) to that by job.
        processor: Milliseconds of the processor, by job.
        uplink: Bytes of a step on the link of a rack to the others, or None.
        counted: Bytes that the library says it has sent, or None.
        ideal: Dict from a job to the fewest bytes that one of it sends and receives.
        error: Why it failed, or None.
    """

    work: str
    workers: int
    library: str
    method: str
    path: str
    rate: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    alone: float | None = None
    floor: float | None = None
    bytes: dict = dataclasses.field(default_factory=dict)
    processor: dict = dataclasses.field(default_factory=dict)
    uplink: float | None = None
    counted: float | None = None
    ideal: dict = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def of_alone(self):
        """Ratio of a step to one without communication; None without figures."""
        return self.median / self.alone if self.median and self.alone else None

    @property
    def of_floor(self):
        """Ratio of a step to the floor; None without figures."""
        return self.median / self.floor if self.median and self.floor else None


def rows(results):
    """Puts the results of all turns together.

    Args:
        results: Those of `document.Document`.

    Returns:
        A list of `Row`, in the order in which their first results came.
    """
    turns = {}
    for result in results:
        key = tuple(result[n] for n in ("work", "workers", "library", "method", "path", "rate"))
        turns.setdefault(key, []).append(result)
    pooled = [_row(key, found) for key, found in turns.items()]
    alone = {
        (row.work, row.workers, row.library): row.median for row in pooled if row.path == "alone"
    }
    return [_compared(row, alone.get((row.work, row.workers, row.library))) for row in pooled]


def _row(key, turns):
    fields = dict(zip(("work", "workers", "library", "method", "path", "rate"), key))
    good = [turn for turn in turns if "times" in turn]
    if not good:
        return Row(**fields, error=turns[0]["error"])
    times = [ms for turn in good for ms in turn["times"]]
    low, *_, high = (
        statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 2
    )
    uplink = [turn["uplink"] for turn in good if turn.get("uplink") is not None]
    counted = [turn["counted"] for turn in good if turn.get("counted") is not None]
    return Row(
        **fields,
        median=statistics.median(times),
        low=low,
        high=high,
        bytes={what: _medians(turn[what] for turn in good) for what in ("sent", "received")},
        processor=_medians(turn["processor"] for turn in good),
        uplink=statistics.median(uplink) if uplink else None,
        counted=statistics.median(counted) if counted else None,
        ideal=good[0]["links"],
    )


def _medians(by_job):
    """Medians over the turns, job by job."""
    turns = list(by_job)
    return {job: statistics.median(turn[job] for turn in turns) for job in turns[0]}


def _compared(row, alone):
    if row.median is None or alone is None:
        return row
    busiest = max(itertools.chain(*row.ideal.values()))
    floor = planning.floor_ms(alone, busiest, wire.parse_rate(row.rate))
    return dataclasses.replace(row, alone=alone, floor=floor)


def speed(rate):
    """Bits per second of a rate, by which rates are put in order."""
    return wire.parse_rate(rate) or float("inf")


def learnt(results, metric, loss_of):
    """Quality beside bytes, of one task of `fidelity.py`.

    Args:
        results: Its results of that task.
        metric: `"accuracy"` or `"perplexity"`.
        loss_of: `fidelity.loss_of`.

    Returns:
        Dict from a compressor or updates to how many times fewer bytes were sent than by exact
        training, and how far the metric is from exact training's; means over the seeds that both
        have.
    """
    by_name = {}
    for result in results:
        by_name.setdefault(result["compression"], {})[result["seed"]] = result
    exact = by_name.pop("none", {})
    points = {}
    for name, of_seeds in by_name.items():
        both = [(of_seeds[seed], exact[seed]) for seed in of_seeds.keys() & exact.keys()]
        both = [(r, e) for r, e in both if "sent" in r and "sent" in e]
        if both:
            fewer = statistics.fmean(e["sent"] / r["sent"] for r, e in both)
            points[name] = (
                fewer,
                statistics.fmean(loss_of(r[metric], e[metric], metric) for r, e in both),
            )
    return points
