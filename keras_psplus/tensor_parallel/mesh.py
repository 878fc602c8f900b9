"""Meshes of workers and layouts of weights, as Keras has them for JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_psplus.all_reduce.topology.group_topology import Topology
from keras_psplus.arguments import shown


class DeviceMesh(keras.distribution.DeviceMesh):
    """Mesh of workers for `ModelParallelStrategy`, as `keras.distribution.DeviceMesh`.

    Args:
        shape: Tuple of ints, the number of workers along each axis.
        axis_names: Their names, such as `("batch", "model")`.
        devices: Workers by their names, as `"worker-1"`, or numbers, in the order of the mesh;
            None for all of them in order.

    Raises:
        ValueError: If the shape does not fit the names or the workers.

    Example:

    ```python
    mesh = keras_psplus.DeviceMesh((2, 2), ("batch", "model"))
    ```

    Reference: https://keras.io/api/distribution/layout_map/
    """

    def __init__(
        self, shape: Sequence[int], axis_names: Sequence[str], devices: Any = None
    ) -> None:
        received = f"Received: shape={shown(shape)}, axis_names={shown(axis_names)}"
        sizes = list(shape) if isinstance(shape, (list, tuple)) else []
        names = list(axis_names) if isinstance(axis_names, (list, tuple)) else []
        if not sizes or not all(isinstance(n, (int, np.integer)) and n > 0 for n in sizes):
            raise ValueError(f"`shape` must be a tuple of positive ints. {received}")
        if len(names) != len(sizes) or len({*names}) != len(names):
            raise ValueError(f"`axis_names` must have a name of its own for each axis. {received}")
        count = math.prod(sizes)
        # Keras would ask TensorFlow for its devices, before the cluster is known.
        devices = np.arange(count) if devices is None else np.array(devices, dtype=object)
        if devices.size != count:
            raise ValueError(
                f"`devices` must name {count} workers, as many as the shape has. {received}, "
                f"devices={shown(devices.tolist())}"
            )
        super().__init__(tuple(int(n) for n in sizes), names, devices)


class TensorLayout(keras.distribution.TensorLayout):
    """Layout of a tensor on a mesh, as `keras.distribution.TensorLayout`.

    Args:
        axes: Tuple with the name of a mesh axis, or None, for each dimension of the tensor.
        device_mesh: The `DeviceMesh`; None for that of the layout map it is put into.

    Raises:
        ValueError: If the mesh has no such axis.

    Example:

    ```python
    layout = keras_psplus.TensorLayout((None, "model"), mesh)
    ```
    """

    def __init__(
        self, axes: Sequence[str | None], device_mesh: keras.distribution.DeviceMesh | None = None
    ) -> None:
        check_axes(axes, device_mesh, "layout")
        super().__init__(tuple(axes), device_mesh)


class LayoutMap(keras.distribution.LayoutMap):
    """Layouts by patterns of paths, as `keras.distribution.LayoutMap`.

    A key is a path of a variable, or a regular expression that matches all of it; a value is a
    `TensorLayout`, or a tuple of its axes. Keys that end in `/output` are for a layer's output.

    Args:
        device_mesh: The `DeviceMesh`.

    Example:

    ```python
    layouts = keras_psplus.LayoutMap(mesh)
    layouts[".*dense/kernel"] = (None, "model")
    ```
    """

    def __init__(self, device_mesh: keras.distribution.DeviceMesh) -> None:
        if not isinstance(device_mesh, keras.distribution.DeviceMesh):
            raise ValueError(
                "`device_mesh` must be a `keras_psplus.DeviceMesh`. "
                f"Received: device_mesh={shown(device_mesh)}"
            )
        super().__init__(device_mesh)

    def __setitem__(self, key: str, layout: Any) -> None:
        axes = layout.axes if isinstance(layout, keras.distribution.TensorLayout) else layout
        check_axes(axes, self.device_mesh, key)
        try:
            re.compile(key)
        except re.error as error:
            raise ValueError(
                f"a key of a layout map must be a path or a regular expression, and {error}. "
                f"Received: key={key!r}"
            ) from error
        super().__setitem__(key, layout)


def check_axes(axes: Any, mesh: keras.distribution.DeviceMesh | None, key: str) -> None:
    """Raises ValueError unless each of a layout's axes is None or one of the mesh."""
    if not isinstance(axes, (list, tuple)) or not all(
        a is None or isinstance(a, str) for a in axes
    ):
        raise ValueError(
            "a layout must be a tuple with the name of a mesh axis, or None, for each dimension. "
            f"Received: {key}={shown(axes)}"
        )
    named = [axis for axis in axes if axis is not None]
    unknown = [axis for axis in named if mesh is not None and axis not in mesh.axis_names]
    if unknown and mesh is not None:
        raise ValueError(
            f"the mesh has no axis '{unknown[0]}'; its axes are {', '.join(mesh.axis_names)}. "
            f"Received: {key}={shown(tuple(axes))}"
        )
    if len({*named}) != len(named):
        raise ValueError(f"a layout can have each axis once. Received: {key}={shown(tuple(axes))}")


class Grid(NamedTuple):
    """Workers of a mesh: each row trains one copy of the model.

    Attributes:
        rows: Tuple of rows, each a tuple of the ranks of its workers.
        model_axis: Name of the axis along a row; None if weights are not cut.
        batch_axis: Name of the axis along which batches are divided; None if there is none.
    """

    rows: tuple[tuple[int, ...], ...]
    model_axis: str | None
    batch_axis: str | None

    def place_of(self, rank: int) -> tuple[int, int]:
        """Numbers of the row and of the column of a worker."""
        row = next(i for i, row in enumerate(self.rows) if rank in row)
        return row, self.rows[row].index(rank)

    def column_of(self, rank: int) -> tuple[int, ...]:
        """Ranks of the workers with the same part of the weights."""
        _, place = self.place_of(rank)
        return tuple(row[place] for row in self.rows)

    def groups_of_rows(self, topology: Topology) -> Topology:
        """Groups of the numbers of rows, of a topology whose groups have whole rows."""
        groups = []
        for group in topology.groups:
            numbers = tuple(i for i, row in enumerate(self.rows) if set(row) <= set(group))
            if sum(len(self.rows[i]) for i in numbers) < len(group):
                raise ValueError(
                    "the groups of `topology` must have whole rows of the mesh, whose workers "
                    f"have a model together. Received: topology={topology.groups}, rows {self.rows}"
                )
            groups.append(numbers)
        return Topology(tuple(groups))


def grid_of(
    mesh: keras.distribution.DeviceMesh, batch_dim_name: str | None, workers: Sequence[str]
) -> Grid:
    """Places a cluster's workers on a mesh.

    Args:
        batch_dim_name: Axis along which batches are divided; None for the first of two, and for
            none of a single axis.
    """
    names, received = list(mesh.axis_names), f"mesh={mesh}"
    if len(names) > 2:
        raise ValueError(
            "a mesh must have one axis for the model, or one for batches and one for the model. "
            f"Received: {received}"
        )
    if batch_dim_name is None and len(names) == 2:
        batch_dim_name = names[0]
    if batch_dim_name is not None and batch_dim_name not in names:
        raise ValueError(
            f"`batch_dim_name` must be an axis of the mesh, {' or '.join(map(repr, names))}. "
            f"Received: batch_dim_name={shown(batch_dim_name)}, {received}"
        )
    devices = mesh.devices.ravel().tolist()
    fits = len(devices) == len(workers)
    ranks = np.array([_rank(one, workers, received) for one in devices * fits])
    if not fits or len({*ranks.tolist()}) != len(workers):
        raise ValueError(
            "a mesh must have each worker of the cluster once: change its shape, or start as many "
            f"workers. The cluster has {len(workers)}: {', '.join(workers)}. Received: {received}, "
            f"which has {len(devices)}"
        )
    ranks = ranks.reshape(mesh.devices.shape)
    model = next((name for name in names if name != batch_dim_name), None)
    if batch_dim_name is None:
        ranks = ranks[np.newaxis]
    elif model is None:
        ranks = ranks[:, np.newaxis]
    elif names.index(batch_dim_name):
        ranks = ranks.T
    return Grid(tuple(tuple(map(int, row)) for row in ranks), model, batch_dim_name)


def _rank(device: Any, workers: Sequence[str], received: str) -> int:
    if isinstance(device, str) and device in workers:
        return list(workers).index(device)
    if isinstance(device, (int, np.integer)) and 0 <= device < len(workers):
        return int(device)
    raise ValueError(
        f"`devices` of a mesh must be workers of the cluster, {', '.join(workers)}, or their "
        f"numbers. Received: {received}, devices with {shown(device)}"
    )
