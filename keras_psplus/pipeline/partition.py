"""Which layers make a stage: contiguous parts of the layers in the order of their calls."""

import fnmatch
from collections.abc import Sequence


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts a list into contiguous parts whose largest sum is as small as can be.

    Args:
        costs: List of numbers, one for each layer, in the order of the calls.
        stages: Number of parts, none of which is empty.

    Returns:
        List with the number of the part of each element.

    Raises:
        ValueError: If there are more parts than elements.

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
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][j]: the smallest largest sum of the first j elements in k parts, and the last cut.
    best = [[(0 if j == 0 else float("inf"), 0) for j in range(count + 1)]]
    for k in range(1, stages + 1):
        row = []
        for j in range(count + 1):
            cuts = range(k - 1, j)
            choices = ((max(best[k - 1][i][0], sums[j] - sums[i]), i) for i in cuts)
            row.append(min(choices, default=(float("inf"), 0)))
        best.append(row)
    parts, end = [0] * count, count
    for k in range(stages, 0, -1):
        first = best[k][end][1]
        parts[first:end] = [k - 1] * (end - first)
        end = first
    return parts


def by_patterns(
    names: Sequence[str], patterns: Sequence[Sequence[str]], all_fit: bool = True
) -> list[int]:
    """Finds the stages of layers by patterns of their names.

    Args:
        names: The layers' names, in the order of the calls.
        patterns: For each stage, a list of patterns, as `fnmatch` has them.
        all_fit: Whether each pattern has to fit a layer.

    Returns:
        List with the number of each layer's stage.

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
    """Completes a list of stages: a layer that has none is on the stage of the one before it.

    Args:
        known: List of the layers' stages in the order of the calls; None where it is not known.

    Returns:
        List of ints.
    """
    stage = next((one for one in known if one is not None), 0)
    found = []
    for one in known:
        stage = stage if one is None else one
        found.append(stage)
    return found
