"""Partition of a model's layers, in call order, into contiguous stages."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Sequence

# Partition of a list into contiguous parts with the smallest largest cost.


def contiguous_parts(
    count: int, parts: int, cost: Callable[[int, int, int], float]
) -> list[tuple[int, int]]:
    """Partition that minimizes the cost of its most expensive part.

    Args:
        parts: Number of parts, none of which is empty; at most `count`.
        cost: Function of the number of a part, its first element and one past its last.

    Returns:
        List of parts, as pairs `[first, end)`.

    Example:

    ```python
    contiguous_parts(4, 2, summed([4, 1, 1, 4]))  # [(0, 2), (2, 4)]
    ```
    """
    # best[k][j]: the smallest largest cost of the first j elements in k parts, and the last cut.
    best = [[(0 if j == 0 else math.inf, 0) for j in range(count + 1)]]
    for k in range(1, parts + 1):
        row = []
        for j in range(count + 1):
            cuts = range(k - 1, j)
            choices = ((max(best[k - 1][i][0], cost(k - 1, i, j)), i) for i in cuts)
            row.append(min(choices, default=(math.inf, 0)))
        best.append(row)
    found, end = [], count
    for k in range(parts, 0, -1):
        first = best[k][end][1]
        found.append((first, end))
        end = first
    return found[::-1]


def summed(costs: Sequence[float]) -> Callable[[int, int, int], float]:
    """Cost function for `contiguous_parts` of parts that cost the sum of their elements."""
    sums = [0.0, *itertools.accumulate(costs)]
    return lambda part, first, end: sums[end] - sums[first]


def part_numbers(parts: list[tuple[int, int]]) -> list[int]:
    """Number of each element's part, of a list of parts as `contiguous_parts` returns it."""
    return [number for number, (first, end) in enumerate(parts) for _ in range(first, end)]


# How much slower than the fastest a cut may be whose memory is more even; from how many times the
# mean on a stage's memory counts as uneven; and bytes that fit everywhere.
_SLOWER, _UNEVEN, _SMALL = 1.1, 1.5, 64e6
# How much slower it may be for fewer bytes from stage to stage: about what measuring is off by.
_SLOWER_TO_SEND_LESS = 1.05


def balance(
    costs: Sequence[float],
    stages: int,
    memory: Callable[[int, int, int], float] | None = None,
    sent: Callable[[int], float] | None = None,
) -> list[int]:
    """Cuts a list into contiguous parts whose largest sum is as small as can be.

    If one part needs more than 1.5 times the mean memory, and more than 64 MB, a cut with less in
    its largest part is taken, as long as its largest sum is at most 1.1 times the smallest
    possible: of those, the one with the smallest largest sum whose memory is even, or else as even
    as it can be. So memory costs no more than a tenth of the speed, and what is even enough costs
    nothing. Else, of the cuts whose largest sum is at most 1.05 times the smallest possible, the
    one is taken that sends the fewest bytes at any place.

    Args:
        costs: List of numbers, one for each layer, in the order of the calls.
        stages: Number of parts, none of which is empty.
        memory: Function of the number of a part, its first element and one past its last that
            returns its bytes; None for parts that need none.
        sent: Function of the number of an element that returns the bytes that are sent if there is
            a cut before it; None if they are none.

    Returns:
        List with the number of the part of each element.

    Example:

    ```python
    balance([4, 1, 1, 4], 2)  # [0, 0, 1, 1]
    ```
    """
    count = len(costs)
    if stages > count:
        raise ValueError(
            f"A model of {count} layer(s) cannot be cut into {stages} stages: start as many "
            "workers as the model has layers, or fewer. A layer of your own that has layers inside "
            f"counts as one. Received: {stages} stages"
        )
    time = summed(costs)
    fastest = contiguous_parts(count, stages, time)
    # Sums differ by rounding.
    shortest = max(time(0, *edges) for edges in fastest) * (1 + 1e-9)
    if sent is not None:
        fastest = _sending_least(count, stages, time, _SLOWER_TO_SEND_LESS * shortest, sent)
    if memory is None:
        return part_numbers(fastest)
    of_parts = [memory(part, *edges) for part, edges in enumerate(fastest)]
    mean = sum(of_parts) / stages
    if max(of_parts) <= max(_UNEVEN * mean, _SMALL):
        return part_numbers(fastest)
    most = _SLOWER * shortest
    even = contiguous_parts(count, stages, lambda *part: _if(time(*part) <= most, memory(*part)))
    least = max(memory(part, *edges) for part, edges in enumerate(even))
    limit = max(least, _UNEVEN * mean, _SMALL)
    return part_numbers(
        contiguous_parts(count, stages, lambda *part: _if(memory(*part) <= limit, time(*part)))
    )


def _sending_least(
    count: int,
    stages: int,
    time: Callable[[int, int, int], float],
    most: float,
    sent: Callable[[int], float],
) -> list[tuple[int, int]]:
    """The fastest partition of those within a time that send the fewest bytes."""

    def sends(_: int, first: int, end: int) -> float:
        return sent(end) if end < count else 0.0

    least = contiguous_parts(count, stages, lambda *part: _if(time(*part) <= most, sends(*part)))
    limit = max(sends(0, *edges) for edges in least)
    return contiguous_parts(count, stages, lambda *part: _if(sends(*part) <= limit, time(*part)))


def _if(allowed: bool, cost: float) -> float:
    return cost if allowed else math.inf


def by_patterns(
    names: Sequence[str], patterns: Sequence[Sequence[str]], all_fit: bool = True
) -> list[int]:
    """Finds the stages of layers by patterns of their names.

    Args:
        names: The layers' names, in the order of the calls.
        patterns: For each stage, a list of patterns, as `fnmatch` has them.

    Raises:
        ValueError: If a layer is in no stage or in two, or a pattern fits no layer.
    """
    found = []
    for name in names:
        fits = [
            stage
            for stage, of_stage in enumerate(patterns)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in of_stage)
        ]
        if len(fits) != 1:
            problem = f"fits the patterns of stages {fits}" if fits else "fits no pattern"
            raise ValueError(
                f"Every layer must be in one of `stages`, and '{name}' {problem}. The model's "
                f"layers are {', '.join(names)}. Received: stages={patterns}"
            )
        found += fits
    for of_stage in patterns if all_fit else ():
        for pattern in of_stage:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"No layer has a name like '{pattern}'. The model's layers are "
                    f"{', '.join(names)}. Received: stages={patterns}"
                )
    return found


def with_neighbours(known: Sequence[int | None]) -> list[int]:
    """Completes a list of stages: a layer without one is on its predecessor's.

    Args:
        known: List of the layers' stages in the order of the calls; None where it is not known.
    """
    stage = next((one for one in known if one is not None), 0)
    found = []
    for one in known:
        stage = stage if one is None else one
        found.append(stage)
    return found
