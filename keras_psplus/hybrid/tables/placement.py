"""Placement of embeddings: as tables on parameter servers, or on the workers."""

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.arguments import shown
from keras_psplus.compression import Compressor
from keras_psplus.core.base.checks import AUTO, MIRRORED, PARAMETER_SERVER
from keras_psplus.core.jobs import failure
from keras_psplus.core.jobs.control import ControlPlane
from keras_psplus.errors import TableServerError, TableServerLostError
from keras_psplus.hybrid.servers import Servers
from keras_psplus.hybrid.tables.prefetch import RowsAhead
from keras_psplus.hybrid.tables.row_cache import RowCaches
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables.policies import Cache, check_cache
from keras_psplus.tables.row_optimizer import config_of

_Rule = str | dict[str, str] | Callable[[str, int, int], str]
_CHOICES = (AUTO, PARAMETER_SERVER, MIRRORED)
_Caches = Cache | dict[str, Cache] | None


@dataclasses.dataclass(frozen=True)
class TablePlacement:
    """Placement of one embedding's table, and the reason."""

    path: str
    rows: int
    dim: int
    where: str
    why: str

    @property
    def on_servers(self) -> bool:
        return self.where == PARAMETER_SERVER


class TablePlacer:
    """Decides where tables lie.

    Args:
        rule: `"auto"`, `"parameter_server"`, `"mirrored"`, a dict from patterns of variables' paths
            to one of these, or a function of a path, a number of rows and one of numbers in a row
            that returns one of these.
        min_table_bytes: Smaller tables stay on the workers under `"auto"`.
        pull_width: Function from the numbers in a row to the words that a worker reads for it.
        push_width: The same for a row's gradient.
        cache: A `Cache` of each table on the servers, a dict from patterns of variables' paths to
            these, or None.
    """

    def __init__(
        self,
        rule: _Rule,
        min_table_bytes: int,
        replicas: int,
        pull_width: Callable[[int], int],
        push_width: Callable[[int], int],
        cache: _Caches = None,
    ) -> None:
        self._cache = cache
        self._rule = check_placement(rule)
        self._min_table_bytes = min_table_bytes
        self._replicas = replicas
        self._widths = pull_width, push_width
        self.decisions: list[TablePlacement] = []
        self._reported = 0

    def decide(self, path: str, rows: int, dim: int, wish: str | None = None) -> TablePlacement:
        """The `TablePlacement` on a table; it is noted for `report`.

        Args:
            dim: Numbers in a row.
            wish: What the layer itself says, before any rule, or None.
        """
        choice, why = (wish, "as the layer says") if wish else self._choose(path, rows, dim)
        if choice == AUTO:
            choice, why = self._by_bytes(rows, dim)
        decision = TablePlacement(path, rows, dim, choice, why)
        if not decision.on_servers and isinstance(self._cache, dict):
            self._check_uncached(decision)
        self.decisions.append(decision)
        return decision

    def cache_of(self, path: str) -> dict[str, int] | None:
        """Configuration of the cache of a table on the servers, or None."""
        if isinstance(self._cache, dict):
            found = (self._cache[p] for p in self._cache if fnmatch.fnmatchcase(path, p))
            return check_cache(next(found, None))
        return check_cache(self._cache)

    def _check_uncached(self, decision: TablePlacement) -> None:
        if self.cache_of(decision.path) is not None:
            raise ValueError(
                "`cache` is for tables on parameter servers, and this one lies on the workers "
                f"({decision.why}). Leave it out of `cache`, or out of `min_table_bytes` by "
                f'`placement={{"{decision.path}": "parameter_server"}}`. '
                f"Received: a cache for '{decision.path}'"
            )

    def _choose(self, path: str, rows: int, dim: int) -> tuple[str, str]:
        if callable(self._rule):
            choice = self._rule(path, rows, dim)
            if choice not in _CHOICES:
                choices = ", ".join(map(repr, _CHOICES))
                raise ValueError(
                    f"The function `placement` must return one of {choices}. "
                    f"Received: {shown(choice)} for {path!r}"
                )
            return choice, "as `placement` says"
        if isinstance(self._rule, dict):
            for pattern, choice in self._rule.items():
                if fnmatch.fnmatchcase(path, pattern):
                    return choice, f"by the rule {pattern!r}"
            return AUTO, ""
        return self._rule, "as `placement` says"

    def _by_bytes(self, rows: int, dim: int) -> tuple[str, str]:
        size = 4 * rows * dim
        if size < self._min_table_bytes:
            return MIRRORED, f"smaller than min_table_bytes={self._min_table_bytes}"
        served, gathered = self._bytes_for_a_row(dim)
        if served > gathered:
            return MIRRORED, (
                f"{gathered} bytes for a row that a worker touches, {served} by parameter servers"
            )
        return PARAMETER_SERVER, (
            f"{served} bytes for a row that a worker touches, {gathered} by all-reduce"
        )

    def _bytes_for_a_row(self, dim: int) -> tuple[int, int]:
        """Bytes per row that a worker sends and receives, on servers or mirrored."""
        pull, push = (width(dim) for width in self._widths)
        # A row number with each.
        served = 4 * (pull + 1) + 4 * (push + 1)
        # Slices are gathered: each worker passes on what the others have.
        gathered = 2 * (self._replicas - 1) * (4 * dim + 8)
        return served, gathered

    @property
    def has_news(self) -> bool:
        """Whether there are decisions that `report` has not shown."""
        return self._reported < len(self.decisions)

    def report(self) -> str:
        """A table of the decisions since the last one, as a string."""
        new, self._reported = self.decisions[self._reported :], len(self.decisions)
        lines = [("table", "shape", "MB", "where", "why")]
        lines += [
            (
                d.path,
                f"({d.rows}, {d.dim})",
                f"{4e-6 * d.rows * d.dim:.3g}",
                "parameter servers" if d.on_servers else "workers",
                d.why,
            )
            for d in new
        ]
        return text_table.aligned(lines)


def check_placement(rule: _Rule) -> _Rule:
    choices = list(rule.values()) if isinstance(rule, dict) else [rule]
    if not callable(rule) and any(choice not in _CHOICES for choice in choices):
        raise ValueError(
            f"`placement` must be one of {', '.join(map(repr, _CHOICES))}, a dict from patterns of "
            "variables' paths to these, or a function of a path, rows and numbers in a row that "
            f"returns one. Received: placement={shown(rule)}"
        )
    return rule


def check_caches(cache: _Caches, prefetch: bool) -> None:
    if cache is None:
        return
    caches = list(cache.values()) if isinstance(cache, dict) else [cache]
    if not all(isinstance(one, Cache) for one in caches):
        raise ValueError(
            "`cache` must be a `tables.Cache`, a dict from patterns of variables' paths to these, "
            f"or None. Received: cache={shown(cache)}"
        )
    if prefetch and cache:
        raise ValueError(
            "`prefetch=True` reads rows that are one update old, and `cache` keeps copies of them: "
            f"use one of the two. Received: cache={shown(cache)} with prefetch=True"
        )


# Tables of one strategy, created on the servers by the chief.
#
# They are known to all workers.


class Tables:
    """Makes tables and their optimizers, in the same order on all workers.

    Args:
        control: `core.jobs.control.ControlPlane`, or None if there is one worker.
        pull_compressor: Compressor of rows that are read, or None.
        push_compressor: Compressor of gradients, or None.
    """

    def __init__(
        self,
        servers: Servers,
        control: ControlPlane | None,
        is_chief: bool,
        pull_compressor: Compressor | None,
        push_compressor: Compressor | None,
        rows_ahead: RowsAhead,
        row_caches: RowCaches,
    ) -> None:
        self._servers, self._control, self._is_chief = servers, control, is_chief
        self._compressors, self._rows_ahead = (pull_compressor, push_compressor), rows_ahead
        self._row_caches = row_caches
        self.all: list[Table] = []

    def make(
        self,
        name: str,
        shape: tuple[int, int],
        initializer: dict[str, Any] | None,
        cache: dict[str, int] | None = None,
    ) -> Table:
        """Makes a table.

        Args:
            shape: Rows and numbers in a row.
            initializer: Serialized initializer.
            cache: What `check_cache` has made of its cache, or None.
        """
        key = len(self.all)
        spec = {"key": key, "name": name, "rows": shape[0], "dim": shape[1]}
        if cache is not None:
            spec["cache"] = cache
        refusal = self._made("table", spec={**spec, "initializer": initializer})
        self._agree("table", f"{spec}", f"{name} {shape}", refusal)
        table = Table(self._servers, key, name, shape, *self._compressors)
        table.cache = cache
        self.all.append(table)
        return table

    def make_dynamic(self, spec: dict[str, Any], make: Callable[..., Any]) -> Any:
        """Makes a table of keys.

        Args:
            spec: What a `RowStore` takes.
        """
        spec = {**spec, "key": len(self.all)}
        refusal = self._made("table", spec=spec)
        # Without a seed, initializers differ; the chief's counts.
        own = {what: value for what, value in spec.items() if what != "initializer"}
        self._agree("table", f"{own}", spec["name"], refusal)
        table = make(self._servers, spec, *self._compressors)
        table.cache = spec.get("cache")
        self.all.append(table)
        return table

    def set_optimizer(
        self, table: Table, optimizer: keras.optimizers.Optimizer, weight_decay: float | None
    ) -> None:
        """Gives a table the optimizer that updates it from now on."""
        if table.optimizer is optimizer:
            return
        config = config_of(optimizer, weight_decay, table.constraint, table.regularizer)
        refusal = self._made(
            "optimizer",
            key=table.key,
            config=config,
            number=table.optimizers + 1,
            first_slot=table.first_slot_of(optimizer),
        )
        described = f"{table.name}, {optimizer.name}"
        self._agree("optimizer of a table", table.name, described, refusal)
        table.optimizer, table.row_config = optimizer, config
        table.optimizers += 1

    def assign(self, table: Table, slot: int, value: Any) -> None:
        """Sets a whole table or slot, on the chief; the others wait for it."""
        self._change(table, slot, lambda: table.write(slot, value))

    def edit(self, table: Table, act: Callable[[], None]) -> None:
        """Has the chief change keys of a table; the others wait for it."""
        if self._row_caches.is_active:
            raise ValueError(
                "While `fit` trains, keys come and go with its updates alone: insert, remove or "
                "clear them between two calls of `fit`, on all workers. Received: a change of the "
                f"keys of '{table.name}' in a callback"
            )
        self._change(table, 0, act)

    def _change(self, table: Table, slot: int, act: Callable[[], object]) -> None:
        if self._is_chief:
            # A backup is of the rows before.
            self._servers.ask_all("settle")
            with tf.init_scope():
                act()
            if self._control is not None:
                self._servers.count_assignment(table.key, slot)
        else:
            count = table.assignments.get(slot, 0) + 1
            self._servers.wait_for_assignment(table.key, slot, count, table.name)
            table.assignments[slot] = count
        self._forget(table)

    def note_followed(self, table: Table, slot: int) -> None:
        """Notes an assignment to a table, or a slot, that only the chief has made."""
        if self._control is not None and not self._is_chief:
            table.assignments[slot] = self._servers.assignments(table.key, slot)
        self._forget(table)

    def _forget(self, table: Table) -> None:
        self._rows_ahead.forget()
        self._row_caches.forget(table)

    def _made(self, what: str, **arguments: Any) -> str:
        """Has the chief make something on the servers; returns their refusal."""
        if not self._is_chief:
            return ""
        try:
            self._servers.make(what, **arguments)
        except TableServerLostError:
            raise
        except TableServerError as error:
            return str(error)
        return ""

    def _agree(self, kind: str, fingerprint: str, description: str, refusal: str) -> None:
        """Checks that all workers are at the same, and raises on all what servers refuse."""
        if self._control is not None:
            # The others would wait for a chief that has ended with an error.
            told = f"{description}\n{refusal}".rstrip("\n")
            with failure.translate_errors(self._control.task):
                told = self._control.check_same(kind, fingerprint, told)
            refusal = told.partition("\n")[2]
        if refusal:
            raise TableServerError(refusal)
