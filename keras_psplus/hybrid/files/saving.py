"""Saving and loading of tables by all parameter servers, directed by the chief."""

import contextlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from keras_psplus.hybrid.files.table_files import STEM, read_list, write_list
from keras_psplus.hybrid.rpc.calls import TableServerError, TableServerLostError
from keras_psplus.hybrid.rpc.servers import Servers
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.log import logger


def save(
    servers: Servers,
    tables: Iterable[Table],
    directory: str,
    also: Callable[[], dict[str, Any]] = lambda: {},
) -> None:
    """Writes all tables; what was there before is deleted when it is no longer needed.

    Args:
        servers: `servers.Servers`.
        tables: List of `Table`s.
        directory: The folder; `full_path` has made it one path for all tasks.
        also: Function that writes what else belongs there, and returns what else the list has to
            hold, a dict.

    Raises:
        TableServerError: If a server cannot write, or is lost.
        OSError: If this process cannot write.
    """
    before = read_list(directory)
    stem = f"{STEM}-{uuid.uuid4().hex[:12]}"
    try:
        servers.ask_all("save", directory=directory, stem=stem)
        described = [_described(name, table) for name, table in named(tables).items()]
        content = {"stem": stem, "servers": len(servers), "tables": described, **also()}
        write_list(directory, content)
    except TableServerLostError:
        raise  # The next one that is written deletes what there is of this.
    except BaseException:
        with contextlib.suppress(TableServerError):
            servers.ask_all("keep", directory=directory, stem=before["stem"] if before else "none")
        raise
    servers.ask_all("keep", directory=directory, stem=stem)


def load(servers: Servers, tables: Iterable[Table], directory: str, strict: bool = False) -> None:
    """Reads all tables.

    Args:
        servers: `servers.Servers`, any number of them.
        tables: List of `Table`s.
        directory: The folder.
        strict: Whether the optimizers must be those that the tables had.

    Raises:
        ValueError: If the folder has no such tables.
        TableServerError: If a server cannot read.
    """
    where = request_of(tables, directory, strict)
    servers.ask_all("load", **where)


def request_of(tables: Iterable[Table], directory: str, strict: bool = False) -> dict[str, Any]:
    """Request to a server to read its rows of tables, a dict."""
    listed = read_list(directory)
    if listed is None:
        raise ValueError(
            "There are no tables there, or they were not written to the end. Give a folder that "
            f"`save_tables` has written. Received: directory={directory!r}"
        )
    stored = {table["name"]: table for table in listed["tables"]}
    places = []
    for name, table in named(tables).items():
        there = stored.get(name)
        if there is None or (there["rows"], there["dim"]) != (table.rows, table.dim):
            known = ", ".join(f"{t['name']} ({t['rows']}, {t['dim']})" for t in listed["tables"])
            raise ValueError(
                f"The table '{name}' of shape ({table.rows}, {table.dim}) is not in {directory}, "
                f"which has {known or 'none'}. Build the same model as when it was written. "
                f"Received: {name}"
            )
        places.append((table.key, there["key"], _slots_to_read(name, table, there, strict)))
    return {
        "directory": directory,
        "stem": listed["stem"],
        "servers": listed["servers"],
        "tables": places,
    }


def named(tables: Iterable[Table]) -> dict[str, Table]:
    """The tables by their names, of which no two are equal."""
    by_name = {}
    for table in tables:
        name = f"{table.name}#{table.key}" if table.name in by_name else table.name
        by_name[name] = table
    return by_name


def _described(name, table):
    return {
        "name": name,
        "key": table.key,
        "rows": table.rows,
        "dim": table.dim,
        "optimizer": _optimizer(table),
        "slots": table.slots_in_use,
    }


def _optimizer(table):
    return type(table.optimizer).__name__ if table.optimizer is not None else None


def _slots_to_read(name, table, there, strict):
    same = (there["optimizer"], there["slots"]) == (_optimizer(table), table.slots_in_use)
    if same:
        return table.slots_in_use
    what = f"{there['optimizer']} for {_optimizer(table)}"
    if strict:
        raise ValueError(
            f"The table '{name}' was saved with another optimizer. Compile the model as it was "
            f"then. Received: {what}"
        )
    if table.slots_in_use:
        logger.warning(
            "the table '%s' was saved with another optimizer: what its own one keeps of each row "
            "stays as it is. Received: %s",
            name,
            what,
        )
    return 0
