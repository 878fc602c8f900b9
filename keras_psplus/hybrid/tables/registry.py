"""Tables of one strategy, created on the servers by the chief.

They are known to all workers.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_psplus.compression import Compressor
from keras_psplus.core.jobs import failure
from keras_psplus.core.jobs.control import ControlPlane
from keras_psplus.errors import TableServerError, TableServerLostError
from keras_psplus.hybrid.rpc.servers import Servers
from keras_psplus.hybrid.tables.row_cache import RowCaches
from keras_psplus.hybrid.tables.rows_ahead import RowsAhead
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables.rows.row_optimizer import config_of


class Tables:
    """Makes tables and their optimizers, in the same order on all workers.

    Args:
        servers: `servers.Servers`.
        control: `core.jobs.control.ControlPlane`, or None if there is one worker.
        is_chief: Whether this worker speaks for all.
        pull_compressor: Compressor of rows that are read, or None.
        push_compressor: Compressor of gradients, or None.
        rows_ahead: `RowsAhead` of this process.
        row_caches: `RowCaches` of this process.
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
            name: Path of its variable.
            shape: Rows and numbers in a row.
            initializer: Serialized initializer.
            cache: What `check_cache` has made of its cache, or None.

        Returns:
            `Table`.
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
            make: `DynamicTable`.

        Returns:
            `DynamicTable`.
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
        """Gives a table the optimizer that updates it from now on.

        Raises:
            ValueError: If it cannot.
        """
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
        """Sets a whole table or slot, on the chief; the others wait for it.

        Raises:
            TableServerError: If the chief does not.
        """
        if self._is_chief:
            # A backup is of the rows before.
            self._servers.ask_all("settle")
            table.write(slot, value)
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
