"""Saving and loading of tables by all parameter servers, directed by the chief."""

import contextlib
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from keras_psplus.errors import TableServerError, TableServerLostError
from keras_psplus.files.tables import STEM, read_list, stems_of, write_list
from keras_psplus.hybrid.servers import Servers
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.log import logger
from keras_psplus.tables.snapshot import needs_whole


def save(servers: Servers, tables: Iterable[Table], directory: str) -> None:
    """Writes all tables; what was there before is deleted when it is no longer needed.

    Args:
        directory: The folder; `full_path` has made it one path for all tasks.
    """
    before = read_list(directory)
    content = begin(servers, tables, directory)
    content = finish(servers, directory, content, stems_of(before) if before else [])
    write_list(directory, content)
    servers.ask_all("keep", directory=directory, stems=[content["stem"]])


def begin(
    servers: Servers, tables: Iterable[Table], directory: str, chain: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Has all servers begin to write their rows of tables as they are now.

    Of a dynamic table they write the changes alone, if they are few beside the rows.

    Args:
        chain: That of the list before, in the same folder.
    """
    stem = f"{STEM}-{uuid.uuid4().hex[:12]}"
    before = [] if needs_whole([one["changes"] for one in chain]) else list(chain)
    follows = [one["stem"] for one in before]
    servers.ask_all("begin_save", directory=directory, stem=stem, follows=follows)
    described = [_described(name, table) for name, table in named(tables).items()]
    return {"stem": stem, "servers": len(servers), "tables": described, "chain": before}


def finish(
    servers: Servers, directory: str, content: dict[str, Any], stems: Sequence[str] | None
) -> dict[str, Any]:
    """Waits until all servers have written; their files count once a list has them.

    Args:
        stems: Beginnings of the names of files that stay if a server cannot write; None if that
            is not known.
    """
    try:
        answers = servers.ask_all("end_save")
    except TableServerLostError:
        raise  # The next one that is written deletes what there is of this.
    except TableServerError:
        if stems is not None:
            with contextlib.suppress(TableServerError):
                servers.ask_all("keep", directory=directory, stems=stems)
        raise
    own = {"stem": content["stem"], "changes": sum(answer["changes"] for answer in answers)}
    before = [] if all(answer["is_whole"] for answer in answers) else content["chain"]
    return {**content, "chain": [*before, own]}


def load(servers: Servers, tables: Iterable[Table], directory: str) -> None:
    """Reads all tables, which are found by their names."""
    listed = read_list(directory)
    if listed is None:
        raise ValueError(
            "There are no tables there, or they were not written to the end. Give a folder that "
            f"`save_tables` has written. Received: directory={directory!r}"
        )
    stored = {entry["name"]: entry for entry in listed["tables"]}
    pairs = []
    for name, table in named(tables).items():
        entry = stored.get(name)
        if entry is None or (entry["rows"], entry["dim"]) != (table.rows, table.dim):
            known = ", ".join(f"{t['name']} ({t['rows']}, {t['dim']})" for t in listed["tables"])
            raise ValueError(
                f"The table '{name}' of shape ({table.rows}, {table.dim}) is not in {directory}, "
                f"which has {known or 'none'}. Build the same model as when it was written. "
                f"Received: {name}"
            )
        pairs.append((table, entry))
    servers.ask_all("load", **request_of(pairs, directory, listed))


def request_of(
    pairs: Iterable[tuple[Table, dict[str, Any]]],
    directory: str,
    listed: dict[str, Any],
    is_strict: bool = False,
) -> dict[str, Any]:
    """Request to a server to read its rows of tables.

    Args:
        pairs: Tables and their entries in the list.
        is_strict: Whether the optimizers must be those that the tables had.
    """
    places = [
        (table.key, entry["key"], _slots_to_read(table, entry, is_strict)) for table, entry in pairs
    ]
    return {
        "directory": directory,
        "stems": stems_of(listed),
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


def _described(name: str, table: Table) -> dict[str, Any]:
    return {
        "name": name,
        "key": table.key,
        "rows": table.rows,
        "dim": table.dim,
        "optimizer": _optimizer(table),
        "slots": table.slots_in_use,
    }


def _optimizer(table: Table) -> str | None:
    return type(table.optimizer).__name__ if table.optimizer is not None else None


def _slots_to_read(table: Table, there: dict[str, Any], is_strict: bool) -> int:
    same = (there["optimizer"], there["slots"]) == (_optimizer(table), table.slots_in_use)
    if same:
        return table.slots_in_use
    what = f"{there['optimizer']} for {_optimizer(table)}"
    if is_strict:
        raise ValueError(
            f"The table '{table.name}' was saved with another optimizer. Compile the model as it "
            f"was then. Received: {what}"
        )
    if table.slots_in_use:
        logger.warning(
            "the table '%s' was saved with another optimizer: what its own one keeps of each row "
            "stays as it is. Received: %s",
            table.name,
            what,
        )
    return 0
