"""The plan: predicted costs of each entry for one model, the recommended one first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from keras_psplus import text_table
from keras_psplus.planning import cost_model
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.link_bytes import Table, Variable, Work
from keras_psplus.planning.traits import Traits

EXACT = "exact"
# What takes as good as the same time is not preferred to what is simpler.
_LEVEL = 1.02


@dataclasses.dataclass(frozen=True)
class Facts:
    """Measurements of a model in one process.

    Attributes:
        batch_rows: Rows of the script's batches.
        rows: Rows of one worker's.
        step_ms: Milliseconds of a step with one worker's.
        single_ms: Milliseconds of a step with the script's batches.
        work: Gradients that a worker sends in a step.
        int8_ms: Milliseconds of the processor to send a million elements as int8, with feedback.
    """

    model: str
    batch_rows: int
    rows: int
    step_ms: float
    single_ms: float
    work: Work
    int8_ms: float = cost_model.COMPRESSOR_MS["int8"]

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Facts:
        """Reads what the measured process has written."""
        variables = [Variable(tuple(v["shape"]), v["factor_rows"]) for v in answer["variables"]]
        tables = [
            Table(t["rows"], t["dim"], {int(n): rows for n, rows in t["touched"].items()})
            for t in answer["tables"]
        ]
        rest = {key: answer[key] for key in answer if key not in ("variables", "tables", "slots")}
        return cls(work=Work(variables, tables, answer.get("slots", 0.0)), **rest)

    @property
    def processor(self) -> float:
        """Slowness of the measured processor, relative to the lab's."""
        return self.int8_ms / cost_model.COMPRESSOR_MS["int8"]

    def one_worker_ms(self, workers: int) -> float:
        """Milliseconds of one worker for the rows of all workers' batches."""
        return self._milliseconds_of(workers * self.rows)

    def shared_by(self, workers: int) -> Facts:
        """Linear estimate of the measurements for another number of workers."""
        rows = max(1, math.ceil(self.batch_rows / workers))
        if rows == self.rows:
            return self
        ratio = rows / self.rows
        variables = [
            v if v.factor_rows is None else Variable(v.shape, math.ceil(v.factor_rows * ratio))
            for v in self.work.variables
        ]
        tables = [
            dataclasses.replace(t, touched={n: t.rows_of(n * ratio) for n in t.touched})
            for t in self.work.tables
        ]
        work = dataclasses.replace(self.work, variables=variables, tables=tables)
        ms = self._milliseconds_of(rows)
        return dataclasses.replace(self, rows=rows, step_ms=ms, work=work)

    def _milliseconds_of(self, rows: int) -> float:
        """Milliseconds of a step with some rows, nondecreasing in their number."""
        if self.batch_rows == self.rows:
            return self.single_ms * rows / self.rows
        slope = max(0.0, (self.single_ms - self.step_ms) / (self.batch_rows - self.rows))
        line = self.single_ms + slope * (rows - self.batch_rows)
        return max(line, self.step_ms * min(1.0, rows / self.rows))


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way of training, and what it would take.

    Attributes:
        entry: Its name in the catalogue.
        loses: As of `Traits.loses`.
        needs: Number of things that a plainer entry has not: servers, weights or state in shares.
        speedup: How many times as fast as one worker on the same rows.
        is_rough: Whether its milliseconds are a rough estimate: what tensor parallelism sends
            depends on layers of which a plan knows little.
    """

    entry: str
    loses: str
    needs: int
    speedup: float
    prediction: cost_model.Prediction
    is_rough: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "entry": self.entry,
            "loses": self.loses,
            "speedup": self.speedup,
            **dataclasses.asdict(self.prediction),
        }


@dataclasses.dataclass(frozen=True)
class Choices:
    """The plan.

    Attributes:
        facts: What was measured.
        cluster: What is planned for.
        choices: The recommended `Choice` first, the others by their milliseconds.
    """

    facts: Facts
    cluster: Cluster
    choices: tuple[Choice, ...]

    @property
    def recommended(self) -> Choice:
        """The fastest of those that lose nothing and fit into a worker's memory."""
        return self.choices[0]

    @property
    def reason(self) -> str:
        """Reason for the recommendation, in one sentence or two."""
        best = self.recommended
        moved = max(best.prediction.sent, best.prediction.received)
        why = f"`{best.entry}` is the fastest that trains as one process does"
        if not self.cluster.fits(best.prediction):
            why = f"No exact entry fits into the memory of a worker; `{best.entry}` needs the least"
        elif large := [
            f"`{choice.entry}`"
            for choice in self.choices[1:]
            if choice.loses == EXACT and not self.cluster.fits(choice.prediction)
        ]:
            why += f" and fits into a worker's memory, unlike {', '.join(large)}"
        if best.entry == "single":
            why = "One process is the fastest that trains as one process does: the links are too "
            why += f"slow, or the steps too short, for {self.cluster.workers} workers"
            if others := [c for c in self.choices[1:] if c.loses == EXACT]:
                name = best_of(others, self.cluster).entry
                why += f" (with them, `{name}` is the best exact one)"
        elif moved:
            part = self.cluster.ms_of(moved) / best.prediction.ms
            why += f" ({part:.0%} of its step is the link's)"
        faster = [
            choice
            for choice in self.choices[1:]
            if choice.prediction.ms < best.prediction.ms / _LEVEL
            and self.cluster.fits(choice.prediction)
            and not choice.is_rough
        ]
        rows = [c for c in faster if c.entry != "single"]
        if not rows:
            return f"{why}."
        first = min(rows, key=lambda choice: choice.prediction.ms)
        return f"{why}. `{first.entry}` takes {first.prediction.ms:.4g} ms, but: {first.loses}."

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        facts = dataclasses.asdict(self.facts)
        for table in facts["work"]["tables"]:
            table["touched"] = {str(n): rows for n, rows in table["touched"].items()}
        return {
            "recommended": self.recommended.entry,
            "reason": self.reason,
            "cluster": dataclasses.asdict(self.cluster),
            "measured": facts,
            "choices": [choice.as_dict() for choice in self.choices],
        }

    def __str__(self) -> str:
        facts, cluster, work = self.facts, self.cluster, self.facts.work
        bits = cluster.bits_per_second
        rate = f"of {bits / 1e6:g} Mbit/s" if bits else "without limit"
        head = (
            f"'{facts.model}' on {cluster.workers} workers and {cluster.ps} ps, links {rate}: "
            f"{facts.rows} rows a worker in {facts.step_ms:.4g} ms; {work.elements:,} weights with "
            f"dense gradients"
        )
        if work.tables:
            head += f", {len(work.tables)} table(s) of {work.table_elements:,}, of which a batch "
            head += f"looks up {work.rows_of(1):,.0f} row(s)"
        if facts.rows * cluster.workers > facts.batch_rows:
            head += f"\nthe batch of {facts.batch_rows} rows is taken to grow to "
            head += f"{facts.rows * cluster.workers}, for each worker to have one"
        titles = ("entry", "ms", "speed-up", "MB sent", "received", "MB memory")
        rows = [(*titles, "scales to", "ends by", "loses")]
        for choice in self.choices:
            one = choice.prediction
            rows.append(
                (
                    choice.entry,
                    f"{one.ms:.1f}",
                    f"{choice.speedup:.2f}",
                    f"{one.sent / 1e6:.3f}",
                    f"{one.received / 1e6:.3f}",
                    f"{one.memory / 1e6:.1f}{'' if cluster.fits(one) else ' too much'}",
                    f"{one.scales_to}",
                    one.ends_by or "-",
                    choice.loses,
                )
            )
        return f"{head}\n{text_table.aligned(rows)}\n{self.reason}"


def choose(facts: Facts, entries: Mapping[str, Traits], cluster: Cluster) -> Choices:
    """Makes the plan.

    Args:
        facts: What was measured.
        entries: Dict from the names of the catalogue's entries to their traits.
        cluster: What to plan for; its hosts are taken to have the processor that was measured.
            Without ps, entries that need them are left out.
    """
    found = [
        predict(name, traits, facts, cluster)
        for name, traits in entries.items()
        if cluster.ps or not traits.has_servers
    ]
    recommended = best_of([choice for choice in found if choice.loses == EXACT], cluster)
    rest = sorted((c for c in found if c is not recommended), key=lambda c: c.prediction.ms)
    cluster = dataclasses.replace(cluster, processor=facts.processor)
    return Choices(facts, cluster, (recommended, *rest))


def predict(entry: str, traits: Traits, facts: Facts, cluster: Cluster) -> Choice:
    """Predicts the costs of one entry.

    Args:
        facts: What was measured.
        cluster: As of `choose`.
    """
    cluster = dataclasses.replace(cluster, processor=facts.processor)
    alone_ms = facts.one_worker_ms(cluster.workers)
    step_ms = alone_ms if traits.path == "alone" else facts.step_ms
    one = cost_model.predict(traits, facts.work, step_ms, cluster)
    needs = 2 * traits.has_servers + (traits.shard is not None)
    is_rough = traits.path == "tensor_parallel"
    return Choice(entry, traits.loses, needs, alone_ms / one.ms, one, is_rough)


def best_of(choices: Iterable[Choice], cluster: Cluster) -> Choice:
    """The fastest choice that fits; among equals, the plainest, with the shortest name.

    Rough estimates count if nothing else fits into a worker's memory. If none fits, the one that
    needs the least.
    """
    choices = list(choices)
    fitting = [choice for choice in choices if cluster.fits(choice.prediction)]
    if not fitting:
        return min(choices, key=lambda choice: choice.prediction.memory)
    choices = [choice for choice in fitting if not choice.is_rough] or fitting
    fastest = min(choice.prediction.ms for choice in choices)
    level = [choice for choice in choices if choice.prediction.ms <= _LEVEL * fastest]
    return min(level, key=lambda choice: (choice.needs, len(choice.entry)))
