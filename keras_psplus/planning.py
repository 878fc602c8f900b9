"""Bytes of a step, on links and in memory, and its floor, by arithmetic alone.

Nothing here imports TensorFlow. Headers, metrics and control messages are not in them. A sum over
`n` workers takes each of them `2 (n - 1) / n` of a payload in either direction; where payloads
cannot be summed on their way, each worker gets `n - 1` of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keras_psplus import text_table

# The file of measured links: what `keras-psplus doctor --links --json` writes, `plan` reads.


class Link(NamedTuple):
    """One pair of hosts.

    Attributes:
        latency_ms: Milliseconds that a short message takes.
        bits_per_second: Each way.
    """

    latency_ms: float
    bits_per_second: float


class Links(NamedTuple):
    """The links of a cluster.

    Attributes:
        hosts: Names of the hosts, in the order of their ranks.
        links: Dict from pairs of places in `hosts`, the smaller one first, to `Link`.
    """

    hosts: Sequence[str]
    links: Mapping[tuple[int, int], Link]

    @property
    def ring(self) -> list[int]:
        """Places in `hosts` in the order in which TensorFlow's rings go round them.

        It is that of the tasks' names as text, in which task 10 comes before task 2. A first host
        that is named as a chief is one, and the others are workers.
        """
        chiefs = 1 if self.hosts[0].startswith("chief") else 0
        return sorted(range(len(self.hosts)), key=lambda rank: (rank >= chiefs, str(rank - chiefs)))

    @property
    def slowest_of_ring(self) -> Link:
        """The longest latency and the least rate between neighbours of a ring."""
        ring = self.ring
        neighbours = [self.links[min(pair), max(pair)] for pair in zip(ring, ring[1:] + ring[:1])]
        return Link(
            max(link.latency_ms for link in neighbours),
            min(link.bits_per_second for link in neighbours),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "hosts": list(self.hosts),
            "links": [
                {
                    "hosts": [self.hosts[i], self.hosts[j]],
                    "latency_ms": link.latency_ms,
                    "bits_per_second": link.bits_per_second,
                }
                for (i, j), link in self.links.items()
            ],
        }


def read_links(path: str | os.PathLike[str]) -> Links:
    """Reads and checks a file of links.

    Args:
        path: Path of a file such as

            {"hosts": ["worker-0", "worker-1"],
             "links": [{"hosts": ["worker-0", "worker-1"], "latency_ms": 0.9,
                        "bits_per_second": 9.4e8}]}
    """
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the links cannot be read: {error}. Received: {str(path)!r}") from None
    return parse_links(text, str(path))


def parse_links(text: str, source: str) -> Links:
    """Reads and checks a text, with errors as of `read_links`."""
    try:
        given = json.loads(text)
        hosts, rows = given["hosts"], given["links"]
        named = [(row["hosts"], row["latency_ms"], row["bits_per_second"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            "a file of links is what `keras-psplus doctor --links --json` prints: an object with "
            '"hosts", and "links" that each have "hosts", "latency_ms" and "bits_per_second". '
            f"{type(error).__name__}: {error}. Received: {source}"
        ) from None
    problem = _problem(hosts, named)
    if problem:
        raise ValueError(f"the links do not fit: {problem}. Received: {source}")
    place = {host: i for i, host in enumerate(hosts)}
    links = {
        (min(place[a], place[b]), max(place[a], place[b])): Link(float(latency), float(rate))
        for (a, b), latency, rate in named
    }
    return Links(hosts, dict(sorted(links.items())))


def _problem(hosts: Any, named: Sequence[tuple[Any, Any, Any]]) -> str | None:
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        return f'"hosts" is a list of names, and not {hosts!r}'
    if len(hosts) < 2 or len(set(hosts)) < len(hosts):
        return f"it takes two hosts or more, each named once, and not {hosts}"
    seen = set()
    for pair, latency, rate in named:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
            return f"a link is between two hosts, and not {pair!r}"
        unknown = [host for host in pair if host not in hosts]
        if unknown:
            return f'{unknown[0]!r} is not among "hosts"'
        if frozenset(pair) in seen:
            return f"{pair[0]} and {pair[1]} are there twice"
        seen.add(frozenset(pair))
        if not _is_number(latency) or latency < 0:
            return f'"latency_ms" of {pair[0]} and {pair[1]} is 0 or more, and not {latency!r}'
        if not _is_number(rate) or rate <= 0:
            return f'"bits_per_second" of {pair[0]} and {pair[1]} is above 0, and not {rate!r}'
    missing = [p for p in itertools.combinations(hosts, 2) if frozenset(p) not in seen]
    if missing:
        others = f", and {len(missing) - 1} other pair(s)" if len(missing) > 1 else ""
        return f"{' and '.join(missing[0])} are missing{others}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# Traits of an entry: messages and their receivers, which determine bytes and rounds.

_PATHS: dict[str | None, str] = {
    "MultiWorkerMirroredStrategy": "all_reduce",
    "ParameterServerStrategy": "parameter_server",
    "HybridStrategy": "hybrid",
    "ModelParallelStrategy": "tensor_parallel",
    None: "alone",
}
_UPDATES = {"accumulate": "accumulate", "local_sgd": "local", "diloco": "local"}


@dataclasses.dataclass(frozen=True)
class Traits:
    """Messages of an entry, and their receivers.

    Attributes:
        path: `"alone"`, `"all_reduce"`, `"parameter_server"`, `"hybrid"` or `"tensor_parallel"`.
        compression: Of dense gradients, as `keras_psplus.compression.get` names them; None for
            float32, `"nothing"` if they are not sent.
        rows: Of rows' gradients.
        pull: Of what is read of servers.
        updates: None for every step, `"accumulate"`, or `"local"` for steps without the others.
        every: Steps from one exchange to the next.
        waits: Whether the workers take each step together.
        together: Keras's `steps_per_execution`, for strategies whose workers wait for each other.
        needs_racks: Whether it is of use only where links differ.
        prefetch: Whether rows are read of servers while the step before computes.
        shard: As of `MultiWorkerMirroredStrategy`.
    """

    path: str = "all_reduce"
    compression: str | None = None
    rows: str | None = None
    pull: str | None = None
    updates: str | None = None
    every: int = 1
    waits: bool = True
    together: int = 1
    needs_racks: bool = False
    prefetch: bool = False
    shard: str | None = None

    @property
    def has_servers(self) -> bool:
        return self.path in ("parameter_server", "hybrid")

    @property
    def loses(self) -> str:
        """Differences from the training of one process; `"exact"` if there are none."""
        lossy = [c for c in (self.compression, self.rows, self.pull) if c not in (None, "factors")]
        found = {
            "stale": not self.waits or self.prefetch,
            "local steps": self.updates == "local",
            f"batch x{self.every}": self.updates == "accumulate",
            "lossy": bool(lossy),
        }
        return ", ".join(word for word, is_so in found.items() if is_so) or "exact"


def traits_of(strategy: str | None, arguments: Mapping[str, Any]) -> Traits:
    """Traits of an entry of the catalogue."""
    path = _PATHS[strategy]
    rows = arguments.get("row_compression" if path == "hybrid" else "compression")
    updates, _, every = arguments.get("updates", "").partition(":")
    return Traits(
        path=path,
        compression=arguments.get("compression"),
        rows=rows,
        pull=arguments.get("pull_compression"),
        updates=_UPDATES.get(updates),
        every=int(every or 1),
        waits=path != "parameter_server" or arguments.get("mode") == "sync",
        needs_racks="topology" in arguments,
        prefetch=arguments.get("prefetch", False),
        shard=arguments.get("shard"),
    )


WORD = 4
_PLACE = 2
# A sum in a ring goes round twice, what is gathered once; PowerSGD sums one of its matrices to find
# the other.
_PASSES = {"topk": 1, "powersgd": 4}
_ID = 8
_BLOCK = 256  # elements of int8 that share a scale
# `HybridStrategy(min_table_bytes=)`: smaller tables stay on the workers.
_LEAST_TABLE = 1 << 20
_BYTES = {None: 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + WORD / _BLOCK, "sign": 1 / 8}


@dataclasses.dataclass(frozen=True)
class Variable:
    """A trained variable whose gradient is dense.

    Attributes:
        factor_rows: Rows of the two matrices that one worker's gradient is the product of; None if
            it is no such product.
    """

    shape: tuple[int, ...]
    factor_rows: int | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Table:
    """A trained table of which a step looks up some rows.

    Attributes:
        dim: Numbers in a row.
        touched: Dict from numbers of batches of one worker to the distinct rows in them.
    """

    rows: int
    dim: int
    touched: Mapping[int, float]

    @property
    def elements(self) -> int:
        return self.rows * self.dim

    def rows_of(self, batches: float) -> float:
        """Distinct rows in so many batches of one worker.

        Between and beyond the counted numbers of batches, rows grow by a power of them.
        """
        known = sorted(self.touched.items())
        if len(known) == 1:
            return min(self.rows, known[0][1] * batches)
        upper = next((i for i, (n, _) in enumerate(known) if n >= batches), len(known) - 1)
        (n1, rows1), (n2, rows2) = known[max(upper - 1, 0)], known[max(upper, 1)]
        if not rows1:
            return 0.0
        power = math.log(rows2 / rows1) / math.log(n2 / n1)
        return min(float(self.rows), rows1 * math.pow(batches / n1, power))


@dataclasses.dataclass(frozen=True)
class Work:
    """Gradients that one worker sends in a model's step.

    Attributes:
        variables: Those with dense gradients.
        tables: Those with sparse ones.
        slots: Numbers that the optimizer keeps for each weight.
    """

    variables: Sequence[Variable] = ()
    tables: Sequence[Table] = ()
    slots: float = 0.0

    @property
    def elements(self) -> int:
        """Number of elements of what has dense gradients."""
        return sum(variable.elements for variable in self.variables)

    @property
    def table_elements(self) -> int:
        return sum(table.elements for table in self.tables)

    def rows_of(self, batches: float) -> float:
        """Distinct rows of all tables in so many batches of one worker."""
        return sum(table.rows_of(batches) for table in self.tables)


class Flows(NamedTuple):
    """Bytes of one step of one worker.

    Attributes:
        between: What it sends to other workers, and receives from them.
        up: What it sends to parameter servers.
        down: What it receives from them.
    """

    between: float = 0.0
    up: float = 0.0
    down: float = 0.0


def flows(traits: Traits, work: Work, workers: int) -> Flows:
    """Bytes of one step of one worker."""
    if traits.path == "alone":
        return Flows()
    if traits.path == "hybrid":
        mirrored = dataclasses.replace(traits, path="all_reduce")
        small = dataclasses.replace(work, tables=[t for t in work.tables if not _is_served(t)])
        large = [table for table in work.tables if _is_served(table)]
        return Flows(flows(mirrored, small, workers).between, *_of_rows(traits, large))
    every = traits.every
    dense = _payload(work, traits.compression, workers)
    if traits.path == "tensor_parallel":
        layers = sum(_of_layer(variable, workers) for variable in work.variables)
        return Flows(layers + _looked_up(work, workers))
    if traits.path == "all_reduce":
        if traits.updates == "local":
            # Of a table, too, all is sent that may have changed.
            table = WORD * work.table_elements * _BYTES.get(traits.rows, 4.0) / 4
            rows = 2 * (workers - 1) / workers * table
        else:
            rows = (workers - 1) * _rows(work.tables, every, traits.rows)
        summed = _summed(dense, traits.compression, workers)
        return Flows((summed + rows) / every + _gathered(traits.shard, work, workers))
    if traits.updates == "local":
        # Whole tables are read and sent, though rows would do, once for each exchange.
        whole = Work([*work.variables, *(Variable((table.elements,)) for table in work.tables)])
        up = _payload(whole, traits.compression, workers) / every
        return Flows(0.0, up, _payload(whole, traits.pull, workers) / every)
    up, down = _of_rows(traits, work.tables)
    return Flows(0.0, up + dense / every, down + _payload(work, traits.pull, workers))


def links(traits: Traits, work: Work, workers: int, ps: int) -> dict[str, tuple[float, float]]:
    """Bytes of one step of all workers, on each link.

    Args:
        ps: Number of parameter servers, which share evenly.

    Returns:
        Bytes that a `"worker"` and, if there are servers, a `"ps"` sends and receives.
    """
    between, up, down = flows(traits, work, workers)
    of_worker = {"worker": (up + between, down + between)}
    if not traits.has_servers:
        return of_worker
    share = workers / ps
    return {**of_worker, "ps": (share * down, share * up)}


def busiest(traits: Traits, work: Work, workers: int, ps: int) -> float:
    """Bytes of one step in the direction of a link that has most of them."""
    return max(max(both) for both in links(traits, work, workers, ps).values())


def rounds(traits: Traits, work: Work, workers: int) -> float:
    """Messages of a step, each of which waits for the one before."""
    if traits.path == "tensor_parallel":
        # A gathering and a sum of each layer, one after the other.
        layers = sum(_is_cut(variable, workers) for variable in work.variables)
        return (3 * layers + 2 * len(work.tables)) * (workers - 1)
    moved, between = flows(traits, work, workers), 0
    if moved.between:
        passes = _PASSES.get((traits.compression or "").partition(":")[0], 2)
        # Weights in shares are gathered for backward as well.
        between = (passes + (traits.shard == "all")) * (workers - 1)
    # There and back: rows are read before the step, and sent while workers sum their gradients.
    total = 2 + max(between, 2) if moved.up else between
    return total / traits.every


def floor_ms(
    compute_ms: float,
    count: float,
    bits_per_second: float | None,
    messages: float = 0.0,
    delay_ms: float = 0.0,
) -> float:
    """Milliseconds that a step takes at least, by its computing, bytes and delays."""
    link_ms = 8e3 * count / bits_per_second if bits_per_second else 0.0
    # Bytes are under way while others' delays pass; the messages of the last gradient are not.
    return max(link_ms, compute_ms + messages * delay_ms)


def memory(traits: Traits, work: Work, workers: int) -> float:
    """Bytes of weights, gradients and the optimizer's state on a worker, without activations."""
    slots = work.slots
    rows = sum(table.rows_of(1) * table.dim for table in work.tables)
    if traits.path == "parameter_server":
        copies = 2 if traits.updates == "local" else 1
        return WORD * (copies * work.elements + work.elements + 2 * rows)
    if traits.path == "tensor_parallel":
        cut = sum(v.elements for v in work.variables if _is_cut(v, workers))
        own = cut / workers + work.elements - cut
        return WORD * (own * (2 + slots) + work.table_elements / workers * (1 + slots) + rows)
    tables = [t.elements for t in work.tables if traits.path != "hybrid" or not _is_served(t)]
    # Residuals of compressors are kept for the next step; casts have none, nor do factors.
    name = (traits.compression or "").partition(":")[0]
    residual = name in ("int8", "sign", "topk", "randomk", "powersgd")
    anchors = 2 if traits.updates == "local" else traits.updates == "accumulate"
    if traits.shard is not None:
        # A gradient is whole until it is summed: that of the largest variable, if not of all.
        whole = max([v.elements for v in work.variables] + tables, default=0)
        kept = 1 / workers if traits.shard == "all" else 1.0
        each = kept + (1 + slots) / workers
        of_tables = sum(tables) * (kept + slots / workers)
        return WORD * (work.elements * each + of_tables + whole + rows)
    dense = work.elements * (2 + slots + residual + anchors)
    return WORD * (dense + sum(tables) * (1 + slots + anchors) + rows)


def goes_as_factors(variable: Variable, compression: str | None, workers: int) -> bool:
    """Whether a variable's gradient is sent as the factors that it is the product of."""
    if not (compression or "").startswith("factors") or variable.factor_rows is None:
        return False
    whole = 2 / workers * variable.elements
    return len(variable.shape) == 2 and variable.factor_rows * sum(variable.shape) <= whole


def _is_served(table: Table) -> bool:
    return WORD * table.elements >= _LEAST_TABLE


def _payload(work: Work, compression: str | None, workers: int) -> float:
    """Bytes of what one worker has to say about dense variables."""
    if compression is not None and compression.startswith("factors"):
        return sum(_factors(variable, compression, workers) for variable in work.variables)
    return sum(_size(variable.shape, compression) for variable in work.variables)


def _factors(variable: Variable, compression: str, workers: int) -> float:
    """The fewer bytes of the two: factors, or pieces of a ring.

    A ring's are the bytes sent to each of the other workers.
    """
    if len(variable.shape) < 2:
        return 2 / workers * _size(variable.shape, None)
    number = _BYTES[compression.partition(":")[2] or None]
    if variable.factor_rows is not None and goes_as_factors(variable, compression, workers):
        return number * variable.factor_rows * sum(variable.shape)
    return number * 2 / workers * variable.elements


def _size(shape: Sequence[int], compression: str | None) -> float:
    elements = math.prod(shape)
    name, _, argument = (compression or "").partition(":")
    if name == "nothing":
        return 0.0
    if len(shape) < 2 and name not in ("bf16", "fp16"):
        return WORD * elements  # Vectors go whole.
    if name == "powersgd":
        # Of more than two axes, all but the last are one.
        return min(elements, int(argument) * (math.prod(shape[:-1]) + shape[-1])) * WORD
    if name == "topk":
        return (WORD + _PLACE) * elements * float(argument)
    if name == "randomk":
        return WORD * elements * float(argument)
    return elements * _BYTES[name or None]


def _is_cut(variable: Variable, workers: int) -> bool:
    """Whether tensor parallelism cuts a kernel by columns over so many workers."""
    return len(variable.shape) > 1 and variable.shape[-1] % workers == 0


def _of_layer(variable: Variable, workers: int) -> float:
    """Bytes of a layer whose kernel is cut by columns.

    All workers have the rows of all. Its output is gathered, and the gradient of its input is
    summed. Kernels of other layers, as of convolutions, are gathered themselves.
    """
    if not _is_cut(variable, workers):
        return 0.0
    others = WORD * (workers - 1) / workers
    if variable.factor_rows is None:
        return others * variable.elements
    rows, (*inner, columns) = workers * variable.factor_rows, variable.shape
    return others * rows * (columns + 2 * math.prod(inner))


def _looked_up(work: Work, workers: int) -> float:
    rows = sum(table.rows_of(1) * table.dim for table in work.tables)
    return 2 * (workers - 1) * WORD * rows


def _gathered(shard: str | None, work: Work, workers: int) -> float:
    """Bytes of whole values that workers which share them gather beyond what all-reduce sends.

    A reduce-scatter and one gather are an all-reduce, but rows of tables are not summed so. The
    second gather is of what backward needs, and no tables. Where an optimizer keeps nothing for a
    weight, there is nothing to share of a table.
    """
    dense, tables = {None: (0, 0), "optimizer": (0, bool(work.slots)), "all": (1, 1)}[shard]
    elements = dense * work.elements + tables * work.table_elements
    return (workers - 1) / workers * WORD * elements


def _summed(payload: float, compression: str | None, workers: int) -> float:
    if (compression or "").startswith(("topk", "factors")):  # These are gathered.
        return (workers - 1) * payload
    return 2 * (workers - 1) / workers * payload


def _of_rows(traits: Traits, tables: Sequence[Table]) -> tuple[float, float]:
    """Bytes of rows to and from servers.

    Rows' ids go up, and values come down; gradients go up with their ids.
    """
    sent = _rows(tables, traits.every, traits.rows) / traits.every
    return sent + _rows(tables, 1, of_row=0), _rows(tables, 1, traits.pull, of_each=0)


def _rows(
    tables: Sequence[Table],
    batches: int,
    compression: str | None = None,
    of_row: int = 1,
    of_each: int = _ID,
) -> float:
    """Bytes of the distinct rows of some batches of one worker, each with its id."""
    number = _BYTES[compression] if compression in ("bf16", "fp16", "int8") else WORD
    return sum(table.rows_of(batches) * (of_row * table.dim * number + of_each) for table in tables)


# The plan: bytes, memory, rounds and a floor of each entry, for one model.

_TITLES = ("entry", "MB sent", "received", "rounds", "MB memory", "floor ms", "loses")


@dataclasses.dataclass(frozen=True)
class Facts:
    """Measurements of one process: of a worker's rows, and of the script's batches."""

    model: str
    batch_rows: int
    rows: int
    step_ms: float
    single_ms: float
    work: Work

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Facts:
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
        bits_per_second: Of each task's link, each way.
        memory: Bytes of a worker's memory; None if they do not count.
    """

    workers: int = 2
    ps: int = 2
    bits_per_second: float = 1e9
    delay_ms: float = 0.0
    memory: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """Costs of a step of one entry."""

    entry: str
    loses: str
    sent: float
    received: float
    rounds: float
    memory: float
    floor_ms: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan."""

    facts: Facts
    cluster: Cluster
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
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
    moved = flows(traits, work, workers)
    count = rounds(traits, work, workers)
    return Row(
        entry,
        traits.loses,
        moved.between + moved.up,
        moved.between + moved.down,
        count,
        memory(traits, work, workers),
        floor_ms(
            facts.single_ms if traits.path == "alone" else facts.step_ms,
            busiest(traits, work, workers, cluster.ps),
            cluster.bits_per_second,
            count,
            cluster.delay_ms,
        ),
    )
