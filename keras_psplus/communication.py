"""Counters of the bytes that training sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from keras_psplus import text_table


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Communication of one variable since the strategy was made.

    Attributes:
        path: The variable's path, such as `"sequential/dense/kernel"`. In a pipeline, also
            `"stage 0 -> stage 1"`.
        direction: `"gradient"` (or, with `updates`, what weights have changed by), or `"pull"` for
            reads of a variable on a parameter server. In a pipeline, `"weight"` for what goes to
            copies of a variable; `"forward"` and `"backward"` between stages.
        compressor: The compressor's description; None if tensors are sent as they are.
        logical_bytes: Bytes of the tensors themselves.
        compressed_bytes: Bytes of what was sent in their place.
        wire_bytes: Bytes that one worker, or with several devices one of its replicas, has sent
            (gradients) or received (pulls) for them. With all-reduce these differ from
            `compressed_bytes` by what the algorithm sends: over N workers, 2 (N - 1) / N times a
            payload that is added up on its way, N - 1 times one that is gathered. With parameter
            servers and in pipelines, they are those of all workers together.
        between_groups_bytes: Those of `wire_bytes` that have gone to another group of a
            `topology`; 0 without one.
    """

    path: str
    direction: str
    compressor: str | None
    logical_bytes: int
    compressed_bytes: int
    wire_bytes: int
    between_groups_bytes: int = 0

    @property
    def ratio(self) -> float:
        """`logical_bytes` over `compressed_bytes`; infinite if nothing is sent."""
        return ratio(self.logical_bytes, self.compressed_bytes)


class Communication:
    """Communication of a strategy: bytes per variable, before and after compression.

    Bytes are counted where they are sent, so that rows of embeddings, warm-up phases and
    accumulated steps are counted at their actual size. Headers of messages, metrics and control
    messages are not counted.

    Example:

    ```python
    model.fit(...)
    for traffic in strategy.communication.traffic():
        print(traffic.path, traffic.logical_bytes, traffic.compressed_bytes, traffic.ratio)
    print(strategy.communication.ratio)
    ```
    """

    def __init__(self) -> None:
        self._sources: list[tuple[Callable[[], list[Traffic]], Callable[[], float]]] = []

    def add_source(
        self, traffic: Callable[[], list[Traffic]], seconds: Callable[[], float]
    ) -> None:
        """Adds a source of counts, for strategies.

        Args:
            traffic: Function without arguments that returns a list of `Traffic`.
            seconds: Function without arguments that returns the seconds for which training has
                waited for communication.
        """
        self._sources.append((traffic, seconds))

    def traffic(self) -> list[Traffic]:
        """Lists the bytes that each variable has sent and received.

        Counted since the strategy was made.

        Returns:
            List of `Traffic`, one for each variable and direction.
        """
        return [entry for traffic, _ in self._sources for entry in traffic()]

    @property
    def logical_bytes(self) -> int:
        """Bytes of all tensors that were to be sent."""
        return sum(entry.logical_bytes for entry in self.traffic())

    @property
    def compressed_bytes(self) -> int:
        """Bytes of what was sent in their place."""
        return sum(entry.compressed_bytes for entry in self.traffic())

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire; see `Traffic`."""
        return sum(entry.wire_bytes for entry in self.traffic())

    @property
    def between_groups_bytes(self) -> int:
        """Bytes on the wire between the groups of a topology; see `Traffic`."""
        return sum(entry.between_groups_bytes for entry in self.traffic())

    @property
    def ratio(self) -> float:
        """`logical_bytes` over `compressed_bytes`; infinite if nothing is sent."""
        return ratio(self.logical_bytes, self.compressed_bytes)

    @property
    def seconds(self) -> float:
        """Seconds for which training has waited for communication."""
        return float(sum(seconds() for _, seconds in self._sources))

    def summary(self) -> str:
        """`traffic` as a table.

        Returns:
            String of a heading, and a line for each variable and direction.
        """
        rows = [("variable", "direction", "compressor", "logical MB", "compressed MB", "ratio")]
        rows += [
            (
                entry.path,
                entry.direction,
                entry.compressor or "none",
                f"{entry.logical_bytes / 1e6:.3f}",
                f"{entry.compressed_bytes / 1e6:.3f}",
                f"{entry.ratio:.1f}",
            )
            for entry in self.traffic()
        ]
        return text_table.aligned(rows)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Bytes of all variables, and seconds of waits, which can be added and subtracted."""

    logical_bytes: int = 0
    compressed_bytes: int = 0
    sent_bytes: int = 0
    pulled_bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, communication: Communication | None) -> Totals:
        if communication is None:
            return cls()
        traffic = communication.traffic()
        return cls(
            sum(entry.logical_bytes for entry in traffic),
            sum(entry.compressed_bytes for entry in traffic),
            sum(entry.wire_bytes for entry in traffic if entry.direction != "pull"),
            sum(entry.wire_bytes for entry in traffic if entry.direction == "pull"),
            communication.seconds,
        )

    @property
    def wire_bytes(self) -> int:
        return self.sent_bytes + self.pulled_bytes

    def __add__(self, other: Totals) -> Totals:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Totals(*(a + b for a, b in pairs))

    def __sub__(self, other: Totals) -> Totals:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Totals(*(a - b for a, b in pairs))


def ratio(logical_bytes: int, compressed_bytes: int) -> float:
    """Ratio of uncompressed to compressed bytes; 1 if there were none."""
    if compressed_bytes:
        return logical_bytes / compressed_bytes
    return float("inf") if logical_bytes else 1.0
