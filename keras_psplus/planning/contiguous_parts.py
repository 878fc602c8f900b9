"""Partition of a list into contiguous parts with the smallest largest cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence


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
