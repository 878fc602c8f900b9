"""Arguments of a dynamic table: which keys it admits, and which rows expire."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from keras_psplus.arguments import number, shown, whole_number

# Steps and counts are int32 on the servers.
_MOST_STEPS = 2**31 - 2
_MOST_BLOOM_COUNT = 255
_POLICIES = ("lru", "lfu")


class _Policy:
    """A policy with a configuration that servers can read."""

    def get_config(self) -> dict[str, Any]:
        """Configuration as a dict for JSON."""
        return {"kind": type(self).__name__, **vars(self)}


class _Expiry(_Policy):
    """A policy of expiry, of which several combine by `|`."""

    def __or__(self, other: Any) -> AnyOf:
        if not isinstance(other, (_Expiry, AnyOf)):
            return NotImplemented
        return AnyOf((*_parts(self), *_parts(other)))


@dataclasses.dataclass(frozen=True)
class Count(_Policy):
    """Admits a key in the step that is the n-th to train with it.

    The steps before see the table's `default` for the key, and change nothing. Several occurrences
    in one step count once, whatever the number of workers.

    Args:
        n: Number of steps, from 1.

    Raises:
        ValueError: If `n` is no such number.

    Example:

    ```python
    table = keras_psplus.layers.DynamicEmbedding(32, admit=keras_psplus.tables.Count(3))
    ```
    """

    n: int

    def __post_init__(self) -> None:
        whole_number("n", self.n, 1, most=_MOST_STEPS)


@dataclasses.dataclass(frozen=True)
class Bloom(_Policy):
    """Admits a key as `Count` does, by a counting Bloom filter of a fixed size.

    A key may be admitted too early, as its counters are other keys' as well; none is too late.

    Args:
        n: Number of steps, from 1 to 255.
        bits: Size of the filter over all servers, 8 bits a counter; 40 for each key that is
            expected make 1 in 40 of them early.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    admit = keras_psplus.tables.Bloom(3, bits=400_000_000)
    ```
    """

    n: int
    bits: int

    def __post_init__(self) -> None:
        whole_number("n", self.n, 1, most=_MOST_BLOOM_COUNT)
        whole_number("bits", self.bits, 64, most=2**40)


@dataclasses.dataclass(frozen=True)
class Probability(_Policy):
    """Admits a key with a probability, at each step that trains with it.

    The draw is a function of the key and of the number of the step.

    Args:
        p: Probability, above 0 and at most 1.

    Raises:
        ValueError: If `p` is no such number.

    Example:

    ```python
    admit = keras_psplus.tables.Probability(0.1)
    ```
    """

    p: float

    def __post_init__(self) -> None:
        number("p", self.p, "a number above 0 and up to 1", lambda p: 0 < p <= 1)


@dataclasses.dataclass(frozen=True)
class Unused(_Expiry):
    """Expires rows that no step has used for a while.

    Args:
        steps: After so many updates of the table without the key.
        days: After so many days without the key, by the clock of the row's server.

    Raises:
        ValueError: If not one of them is given, or it is out of range.

    Example:

    ```python
    expire = keras_psplus.tables.Unused(days=7)
    ```
    """

    steps: int | None = None
    days: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.days is None):
            raise ValueError(
                "`Unused` takes either `steps` or `days`. "
                f"Received: steps={shown(self.steps)}, days={shown(self.days)}"
            )
        if self.steps is not None:
            whole_number("steps", self.steps, 1, most=_MOST_STEPS)
        else:
            number("days", self.days, "a number above 0 and up to 10000", lambda d: 0 < d <= 10_000)


@dataclasses.dataclass(frozen=True)
class Capacity(_Expiry):
    """Expires rows of a table that has more than a number of them.

    Each server keeps its share. Of a share up to 65,536 rows exactly the first in order expire; of
    a larger one, the first of 65,536 rows that move on with the steps. Rows that the step has used
    are the last in order; a step that uses more than the share keeps the share.

    Args:
        rows: Number of rows, from 1.
        policy: `"lru"`, the least recently used rows first; `"lfu"`, the least frequently used.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    expire = keras_psplus.tables.Capacity(50_000_000, policy="lfu")
    ```
    """

    rows: int
    policy: str = "lru"

    def __post_init__(self) -> None:
        whole_number("rows", self.rows, 1, most=2**40)
        if self.policy not in _POLICIES:
            raise ValueError(
                f'`policy` must be "lru" or "lfu". Received: policy={shown(self.policy)}'
            )


@dataclasses.dataclass(frozen=True)
class Norm(_Expiry):
    """Expires a row that an update leaves with a small Euclidean norm.

    Args:
        below: Norm below which a row expires, above 0.

    Raises:
        ValueError: If `below` is no such number.

    Example:

    ```python
    expire = keras_psplus.tables.Unused(days=7) | keras_psplus.tables.Norm(1e-3)
    ```
    """

    below: float

    def __post_init__(self) -> None:
        number("below", self.below, "a number above 0", lambda n: 0 < n < float("inf"))


@dataclasses.dataclass(frozen=True)
class AnyOf:
    """Expires rows that one of several policies expires.

    Raises:
        ValueError: If two of them are of one kind.
    """

    policies: tuple[_Expiry, ...]
    __or__ = _Expiry.__or__
    kind: ClassVar[str] = "AnyOf"

    def __post_init__(self) -> None:
        kinds = [type(policy).__name__ for policy in self.policies]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"Each policy can be given once. Received: {' | '.join(kinds)}")


def check_admit(admit: Any) -> dict[str, Any] | None:
    """Configuration of the argument `admit`.

    Raises:
        ValueError: If it is no policy of admission.
    """
    if admit is None:
        return None
    if isinstance(admit, Mapping):
        return check_admit(_made(admit))
    if isinstance(admit, (Count, Bloom, Probability)):
        return admit.get_config()
    raise ValueError(
        "`admit` must be `tables.Count`, `tables.Bloom`, `tables.Probability` or None. "
        f"Received: admit={shown(admit)}"
    )


def check_expire(expire: Any) -> list[dict[str, Any]]:
    """Configurations of the argument `expire`, of which any may apply.

    Raises:
        ValueError: If it is no policy of expiry.
    """
    if expire is None:
        return []
    if isinstance(expire, (list, tuple)):
        return check_expire(AnyOf(tuple(_made(config) for config in expire)) if expire else None)
    if isinstance(expire, (_Expiry, AnyOf)):
        return [policy.get_config() for policy in _parts(expire)]
    raise ValueError(
        "`expire` must be `tables.Unused`, `tables.Capacity`, `tables.Norm`, some of them joined "
        f"by `|`, or None. Received: expire={shown(expire)}"
    )


def find(expire: Iterable[dict[str, Any]], kind: type) -> dict[str, Any] | None:
    return next((config for config in expire if config["kind"] == kind.__name__), None)


def _parts(policy: Any) -> tuple[_Expiry, ...]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)


def _made(config: Any) -> Any:
    kinds = {kind.__name__: kind for kind in (Count, Bloom, Probability, Unused, Capacity, Norm)}
    if not isinstance(config, Mapping):
        return config
    arguments = dict(config)
    kind = kinds.get(arguments.pop("kind", ""))
    if kind is None:
        raise ValueError(f"There is no such policy of a table. Received: {dict(config)}")
    return kind(**arguments)


# The argument `cache` of tables: rows that workers keep copies of.


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
