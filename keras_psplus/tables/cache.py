"""The argument `cache` of tables: rows that workers keep copies of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_psplus.arguments import shown, whole_number

# Numbers of slots are int32.
_MOST_ROWS = 2**31 - 2


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keeps copies of a table's hottest rows on each worker of `HybridStrategy`.

    `fit` reads a row from its copy while the copy is young enough, so that fewer bytes are sent. In
    one process there is nothing to copy, and it has no effect.

    Args:
        rows: Number of rows for which a worker has room, from 1.
        staleness: For how many updates of the table after it was read a copy is used, from 1.

    Raises:
        ValueError: If an argument is no such number.

    Example:

    ```python
    cache = keras_psplus.tables.Cache(100_000, staleness=100)
    table = keras_psplus.layers.DynamicEmbedding(32, cache=cache)
    ```
    """

    rows: int
    staleness: int

    def __post_init__(self) -> None:
        whole_number("rows", self.rows, 1, most=_MOST_ROWS)
        whole_number("staleness", self.staleness, 1)

    def get_config(self) -> dict[str, int]:
        """Configuration as a dict for JSON."""
        return {"rows": int(self.rows), "staleness": int(self.staleness)}


def check_cache(cache: Any) -> dict[str, int] | None:
    """Configuration of the argument `cache`.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(cache, Mapping) and set(cache) == {"rows", "staleness"}:
        cache = Cache(**cache)
    if cache is not None and not isinstance(cache, Cache):
        raise ValueError(
            f"`cache` must be a `tables.Cache`, or None. Received: cache={shown(cache)}"
        )
    return None if cache is None else cache.get_config()
