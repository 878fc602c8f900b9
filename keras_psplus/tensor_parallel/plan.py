"""Layouts of a model's weights, and places of an optimizer's state."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.core.graph.variables import gradient_shape
from keras_psplus.sharding.places import PieceCut, Place
from keras_psplus.sharding.plan import OptimizerPlan, reason_for_wholes
from keras_psplus.tensor_parallel.mesh import Grid
from keras_psplus.tensor_parallel.variable import cut_of


class CutPlan(OptimizerPlan):
    """Places of optimizer state: cut as its variable is, or whole on every worker."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.reason = reason_for_wholes(optimizer)
        weights = [cut_of(variable) for variable in optimizer._trainable_variables]
        self.places = [
            Place() if weight is None or self.reason is not None else weight.place
            for weight in weights
        ]
        self._count = sum(weight is not None for weight in weights)

    def describe(
        self, optimizer: keras.optimizers.Optimizer, names: Sequence[str], places: Sequence[int]
    ) -> str:
        """One line about how an optimizer updates cut weights."""
        if self.reason is None:
            return f"'{optimizer.name}' keeps the slots of {self._count} cut weights in parts"
        return (
            f"'{optimizer.name}' gathers {self._count} cut weights and their gradients for each "
            f"update, and keeps whole slots on every worker ({self.reason})"
        )


class PiecePlan(OptimizerPlan):
    """Places of optimizer state: in pieces along columns, or as without a mesh.

    Args:
        optimizer: A Keras optimizer that is built.
        rows: Number of rows, and so of pieces.
        columns: Number of columns.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rows: int, columns: int) -> None:
        super().__init__(optimizer, rows * columns)
        self._in_updates = self.places
        if self.reason is not None:
            return
        variables = optimizer._trainable_variables
        self._in_updates = [Place.of_parts(gradient_shape(v), rows) for v in variables]
        splits = [None if w is None else w.cut for w in map(cut_of, variables)]
        self._count = sum(split is not None for split in splits)
        self.places = [
            Place(PieceCut(split, place.parts, columns))
            for split, place in zip(splits, self._in_updates)
        ]

    @property
    def in_updates(self) -> list[Place]:
        return self._in_updates

    def describe(
        self, optimizer: keras.optimizers.Optimizer, names: Sequence[str], places: Sequence[int]
    ) -> str:
        """Text about what a worker keeps of an optimizer."""
        if self.reason is not None:
            return super().describe(optimizer, names, places)
        return (
            f"'{optimizer.name}' keeps the slots of {len(self.places)} variables in pieces along "
            f"the axis of batches, also those of {self._count} cut weights"
        )


class Layouts:
    """Axes along which weights are cut."""

    def __init__(self, layout_map: keras.distribution.LayoutMap, grid: Grid) -> None:
        self._map, self._grid = layout_map, grid
        # Paths of weights that an axis of batches is left out of.
        self.along_batches: set[str] = set()

    def axis_of(self, path: str, shape: Sequence[int]) -> int | None:
        """Axis along which a weight is cut; None if it is on every worker."""
        layout = self._map[path]
        if layout is None:
            return None
        axes = tuple(layout.axes)
        received = f"Received: layout {axes} for '{path}' of shape {tuple(shape)}"
        if len(axes) != len(shape):
            raise ValueError(
                f"the layout of a weight must have an axis, or None, for each of its "
                f"{len(shape)} dimensions. {received}"
            )
        if self._grid.batch_axis in axes and len(self._grid.rows) > 1:
            self.along_batches.add(path)
        if self._grid.model_axis is None or self._grid.model_axis not in axes:
            return None
        axis, parts = axes.index(self._grid.model_axis), len(self._grid.rows[0])
        if shape[axis] % parts:
            raise ValueError(
                f"dimension {axis} of '{path}' cannot be cut into {parts} equal parts: choose "
                f"another size or mesh, or None in its layout. {received}"
            )
        return axis

    def check_used(self, paths: Iterable[str]) -> list[str]:
        """Patterns for weights that match none."""
        paths = list(paths)
        patterns = [key for key in self._map if not key.endswith("/output")]
        unused = [key for key in patterns if not any(_matches(key, path) for path in paths)]
        if patterns and len(unused) == len(patterns):
            raise ValueError(
                "no pattern of `layout_map` matches a weight of the model. A pattern has to match "
                f"all of a path. The paths are {', '.join(paths[:8])}"
                f"{', ...' * (len(paths) > 8)}. Received: {', '.join(map(repr, unused[:8]))}"
            )
        return unused


class AutomaticLayouts(Layouts):
    """Axes that fit each layer by itself, where sizes are multiples of the mesh's.

    1. Attention (`query`, `key`, `value`, `attention_output` of three dimensions) is cut by heads.
    2. Tables of embeddings are cut by vocabulary, or else by width.
    3. Other kernels are cut by columns: along their last dimension.
    """

    def axis_of(self, path: str, shape: Sequence[int]) -> int | None:
        parts = len(self._grid.rows[0])
        if self._grid.model_axis is None:
            return None
        axes = _axes_to_try(path, len(shape))
        return next((axis for axis in axes if shape[axis] and shape[axis] % parts == 0), None)


def _axes_to_try(path: str, rank: int) -> tuple[int, ...]:
    *_, layer, name = "", *path.split("/")
    if layer in ("query", "key", "value") and (name, rank) in (("kernel", 3), ("bias", 2)):
        return (rank - 2,)
    if layer == "attention_output" and (name, rank) == ("kernel", 3):
        return (0,)
    if rank < 2:
        return ()
    if name == "embeddings":
        return 0, 1
    return (rank - 1,) if name.endswith("kernel") else ()


def _matches(key: str, path: str) -> bool:
    return key == path or re.fullmatch(key, path) is not None


def describe(model: Any, layouts: Layouts, unused: Sequence[str], grid: Grid) -> str:
    """Table of what each worker keeps of a model's weights.

    Args:
        unused: Patterns that match no weight.
    """
    sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.variables]
    cuts = [weight for weight in map(cut_of, model.variables) if weight is not None]
    whole, parts = sum(sizes), len(grid.rows[0])
    own = whole
    for weight in cuts:
        own -= weight.cut.width * weight.dtype.size * (parts - 1)
    rows = [("weight", "axis", "each worker has")]
    rows += [(one.path, str(one.cut.axis), str(one.cut.shard)) for one in cuts]
    lines = [
        f"'{model.name}' over {len(grid.rows)} x {parts} workers: {len(cuts)} of {len(sizes)} "
        f"variables are cut, the others are on every worker; each has {own / 1e6:.2f} of "
        f"{whole / 1e6:.2f} MB",
        text_table.aligned(rows),
    ]
    paths = {variable.path for variable in model.variables}
    known = {one.path for one in cuts}
    frozen = [v.path for v in model.variables if v.path not in known and _is_left_out(v, layouts)]
    for text, named in (
        ("matched by no weight", unused),
        ("not cut along the axis of batches, but on all of it", layouts.along_batches & paths),
        ("not cut, as they are made not trainable", frozen),
    ):
        if named:
            lines.append(f"{text}: {', '.join(sorted(named))}")
    return "\n".join(lines)


def _is_left_out(variable: keras.Variable, layouts: Layouts) -> bool:
    return layouts.axis_of(variable.path, variable.shape) is not None
