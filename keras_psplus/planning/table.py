"""The plan: bytes, memory, rounds and a floor of each entry, for one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_psplus import text_table
from keras_psplus.planning import step_bytes
from keras_psplus.planning.step_bytes import Table, Traits, Variable, Work

_TITLES = ("entry", "MB sent", "received", "rounds", "MB memory", "floor ms", "loses")


@dataclasses.dataclass(frozen=True)
class Facts:
    """Measurements of a model in one process.

    Attributes:
        batch_rows: Rows of the script's batches.
        rows: Rows of one worker's.
        step_ms: Milliseconds of a step with one worker's.
        single_ms: Milliseconds of a step with the script's batches.
        work: Gradients that a worker sends in a step.
    """

    model: str
    batch_rows: int
    rows: int
    step_ms: float
    single_ms: float
    work: Work

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


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Cluster that a plan is made for.

    Attributes:
        ps: Number of parameter servers.
        bits_per_second: Of each task's link, each way.
        delay_ms: From host to host.
        memory: Bytes of a worker's memory; None if they do not count.
    """

    workers: int = 2
    ps: int = 2
    bits_per_second: float = 1e9
    delay_ms: float = 0.0
    memory: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """Costs of a step of one entry.

    Attributes:
        entry: Its name in the catalogue.
        loses: As of `Traits.loses`.
        sent: Bytes that a worker sends.
        received: Bytes that it receives.
        rounds: As of `step_bytes.rounds`.
        memory: As of `step_bytes.memory`.
        floor_ms: As of `step_bytes.floor_ms`.
    """

    entry: str
    loses: str
    sent: float
    received: float
    rounds: float
    memory: float
    floor_ms: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan.

    Attributes:
        rows: Those of exact entries first, each group by name.
    """

    facts: Facts
    cluster: Cluster
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        facts = dataclasses.asdict(self.facts)
        for table in facts["work"]["tables"]:
            table["touched"] = {str(n): rows for n, rows in table["touched"].items()}
        return {
            "cluster": dataclasses.asdict(self.cluster),
            "measured": facts,
            "entries": [dataclasses.asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        facts, cluster, work = self.facts, self.cluster, self.facts.work
        delay = f" and {cluster.delay_ms:g} ms" if cluster.delay_ms else ""
        head = (
            f"'{facts.model}' on {cluster.workers} workers and {cluster.ps} ps, links of "
            f"{cluster.bits_per_second / 1e6:g} Mbit/s{delay}: {facts.rows} rows a worker in "
            f"{facts.step_ms:.4g} ms, {facts.batch_rows} in one process in {facts.single_ms:.4g}; "
            f"{work.elements:,} weights with dense gradients"
        )
        if work.tables:
            head += f", {len(work.tables)} table(s) of {work.table_elements:,}, of which a batch "
            head += f"looks up {work.rows_of(1):,.0f} row(s)"
        if facts.rows * cluster.workers > facts.batch_rows:
            head += f"\nthe batch of {facts.batch_rows} rows is taken to grow to "
            head += f"{facts.rows * cluster.workers}, for each worker to have one"
        lines = [_TITLES]
        for row in self.rows:
            fits = cluster.memory is None or row.memory <= cluster.memory
            lines.append(
                (
                    row.entry,
                    f"{row.sent / 1e6:.3f}",
                    f"{row.received / 1e6:.3f}",
                    f"{row.rounds:.4g}",
                    f"{row.memory / 1e6:.1f}{'' if fits else ' too much'}",
                    f"{row.floor_ms:.1f}",
                    row.loses,
                )
            )
        return f"{head}\n{text_table.aligned(lines)}"


def plan(facts: Facts, entries: Mapping[str, Traits], cluster: Cluster) -> Plan:
    """Makes the plan.

    Args:
        cluster: What to plan for. Without ps, entries that need them are left out.
    """
    rows = [
        _row(name, traits, facts, cluster)
        for name, traits in entries.items()
        if cluster.ps or not traits.has_servers
    ]
    rows.sort(key=lambda row: (row.loses != "exact", row.entry))
    return Plan(facts, cluster, tuple(rows))


def _row(entry: str, traits: Traits, facts: Facts, cluster: Cluster) -> Row:
    work, workers = facts.work, cluster.workers
    moved = step_bytes.flows(traits, work, workers)
    rounds = step_bytes.rounds(traits, work, workers)
    return Row(
        entry,
        traits.loses,
        moved.between + moved.up,
        moved.between + moved.down,
        rounds,
        step_bytes.memory(traits, work, workers),
        step_bytes.floor_ms(
            facts.single_ms if traits.path == "alone" else facts.step_ms,
            step_bytes.busiest(traits, work, workers, cluster.ps),
            cluster.bits_per_second,
            rounds,
            cluster.delay_ms,
        ),
    )
