"""Meshes, layouts and workers that do not fit are refused, with their names."""

import types

import keras
import numpy as np
import pytest

import keras_psplus as psp
from keras_psplus.all_reduce.data.same_data import check_same_in_rows
from keras_psplus.all_reduce.topology.group_topology import Topology
from keras_psplus.tensor_parallel.group import is_elementwise
from keras_psplus.tensor_parallel.mesh import Grid, grid_of
from keras_psplus.tensor_parallel.mesh_row import MeshRow
from keras_psplus.tensor_parallel.plan import AutomaticLayouts, Layouts
from tests.support.tables import for_each

WORKERS = ["chief", "worker-0", "worker-1", "worker-2"]
AXES = ("batch", "model")


@for_each(
    "given, text",
    [
        (dict(shape=(), axis_names=()), "tuple of positive ints"),
        (dict(shape=(2, 0), axis_names=AXES), "tuple of positive ints"),
        (dict(shape=(2, 2), axis_names=("model",)), "a name of its own for each axis"),
        (dict(shape=(2, 2), axis_names=("model", "model")), "a name of its own for each axis"),
        (dict(shape=(2, 2), axis_names=AXES, devices=[0, 1]), "must name 4 workers"),
    ],
)
def test_meshes(given, text):
    with pytest.raises(ValueError, match=f"{text}.*Received: shape="):
        psp.DeviceMesh(**given)


@for_each("shape", [(4, 3), (4, None)])
def test_what_a_layer_of_your_own_cannot_split(shape):
    row = MeshRow(types.SimpleNamespace(size=2, place=0))
    with pytest.raises(ValueError, match=r"dimension -1 .* into 2 equal parts: .*Received: shape"):
        row.split(keras.KerasTensor(shape), -1)


def test_keras_hub_takes_the_mesh():
    import keras_hub

    mesh = psp.DeviceMesh((2, 2), AXES)
    layouts = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
    grid = grid_of(mesh, None, WORKERS)
    found = Layouts(layouts, grid)
    path = "transformer_layer_0/self_attention/query/kernel"
    assert found.axis_of(path, (8, 4, 2)) == 0 and found.along_batches == {path}
    assert found.axis_of("token_embedding/embeddings", (12, 8)) == 0
    assert found.axis_of("other/kernel", (3, 3)) is None


@for_each(
    "axes, text",
    [
        ((None, "modle"), "the mesh has no axis 'modle'; its axes are batch, model"),
        (("model", "model"), "each axis once"),
        ("model", "must be a tuple"),
        ((None, 1), "must be a tuple"),
    ],
)
def test_layouts(axes, text):
    layouts = psp.LayoutMap(psp.DeviceMesh((2, 2), AXES))
    with pytest.raises(ValueError, match=f"{text}.*Received: .*kernel="):
        layouts[".*kernel"] = axes
    with pytest.raises(ValueError, match=r"missing \), .*Received: key='\(up/kernel'"):
        layouts["(up/kernel"] = (None, "model")
    layouts["a/kernel"] = (None, "model")
    assert layouts["a/kernel"].axes == psp.TensorLayout((None, "model")).axes


def test_places():
    square = psp.DeviceMesh((2, 2), AXES)
    assert grid_of(square, None, WORKERS) == Grid(((0, 1), (2, 3)), "model", "batch")
    assert grid_of(square, "model", WORKERS) == Grid(((0, 2), (1, 3)), "batch", "model")
    named = psp.DeviceMesh((4,), ("model",), devices=["worker-2", "chief", 1, np.int64(2)])
    grid = grid_of(named, None, WORKERS)
    assert grid == Grid(((3, 0, 1, 2),), "model", None)
    assert grid.place_of(0) == (0, 1) and grid.column_of(0) == (0,)
    row = grid_of(psp.DeviceMesh((4,), ("rows",)), "rows", WORKERS)
    assert row == Grid(((0,), (1,), (2,), (3,)), None, "rows")


@for_each(
    "mesh, batch, text",
    [
        (psp.DeviceMesh((2, 1), AXES), None, "The cluster has 4: chief, worker-0"),
        (psp.DeviceMesh((2, 4), AXES), None, "must have each worker of the cluster once"),
        (psp.DeviceMesh((4,), ("model",), [0, 1, 2, 2]), None, "each worker of the cluster once"),
        (psp.DeviceMesh((4,), ("model",), ["gpu:0", 1, 2, 3]), None, "must be workers of the cl"),
        (psp.DeviceMesh((2, 2), AXES), "data", "`batch_dim_name` must be an axis of the mesh"),
        (psp.DeviceMesh((2, 2, 1), ("a", "b", "c")), None, "one axis for the model, or one for"),
    ],
)
def test_workers(mesh, batch, text):
    with pytest.raises(ValueError, match=f"{text}.*Received: "):
        grid_of(mesh, batch, WORKERS)


def test_groups_of_rows():
    rows = Grid(((0, 2), (1, 3), (4, 6), (5, 7)), "model", "batch")
    groups = rows.groups_of_rows(Topology(((0, 1, 2, 3), (4, 5, 6, 7))))
    assert groups == Topology(((0, 1), (2, 3)))
    with pytest.raises(ValueError, match="must have whole rows of the mesh.*Received: topology="):
        rows.groups_of_rows(Topology(((0, 1, 4, 5), (2, 3, 6, 7))))


def test_no_axis_for_the_model():
    mesh = psp.DeviceMesh((4,), ("rows",))
    layouts = psp.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "rows")
    assert Layouts(layouts, grid_of(mesh, "rows", WORKERS)).axis_of("a/kernel", (3, 3)) is None


@for_each(
    "path, shape, axis",
    [
        ("a/dense/kernel", (3, 4), 1),
        ("a/dense/kernel", (4, 3), None),
        ("a/dense/bias", (4,), None),
        ("a/conv/kernel", (3, 3, 4, 8), 3),
        ("a/lstm_cell/recurrent_kernel", (3, 12), 1),
        ("a/embedding/embeddings", (6, 3), 0),
        ("a/embedding/embeddings", (5, 4), 1),
        ("a/attention/query/kernel", (8, 2, 4), 1),
        ("a/attention/key/kernel", (8, 1, 4), None),
        ("a/attention/value/bias", (2, 4), 0),
        ("a/attention/attention_output/kernel", (2, 4, 8), 0),
        ("a/query/kernel", (3, 4), 1),
        ("a/gamma", (2, 2), None),
    ],
)
def test_automatic_layouts(path, shape, axis):
    mesh = psp.DeviceMesh((2, 2), AXES)
    found = AutomaticLayouts(psp.LayoutMap(mesh), grid_of(mesh, None, WORKERS))
    assert found.axis_of(path, shape) == axis and found.check_used([path]) == []
    rows = psp.DeviceMesh((4,), ("rows",))
    uncut = AutomaticLayouts(psp.LayoutMap(rows), grid_of(rows, "rows", WORKERS))
    assert uncut.axis_of(path, shape) is None


def test_weights():
    mesh = psp.DeviceMesh((2, 2), AXES)
    layouts = psp.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    found = Layouts(layouts, grid_of(mesh, None, WORKERS))
    assert found.axis_of("dense/kernel", (3, 4)) == 1
    with pytest.raises(ValueError, match="dimension 1 of 'dense/kernel' cannot.*Received: layout"):
        found.axis_of("dense/kernel", (4, 3))
    with pytest.raises(ValueError, match="each of its 3 dimensions.*Received: layout"):
        found.axis_of("conv/kernel", (4, 3, 2))
    assert found.check_used(["dense/kernel", "dense/bias"]) == []
    with pytest.raises(
        ValueError, match="no pattern of `layout_map` matches.*Received: '.*kernel'"
    ):
        found.check_used(["dense/bias"])


@for_each(
    "given, text",
    [
        (dict(layout_map={}), '`layout_map` must be "auto", a'),
        (dict(layout_map={"a": ("x",)}, mesh=psp.DeviceMesh((1, 1), AXES)), "no axis 'x'"),
        (dict(layout_map={}, mesh=(2, 2)), "`mesh` must be a"),
        (
            dict(
                layout_map=psp.LayoutMap(psp.DeviceMesh((1, 1), AXES)),
                mesh=psp.DeviceMesh((1, 2), AXES),
            ),
            "`mesh` must be that of `layout_map`",
        ),
        (dict(layout_map={}, mesh=psp.DeviceMesh((1, 1), AXES), compression="x"), "compress"),
        (
            dict(layout_map={}, mesh=psp.DeviceMesh((1, 1), AXES), updates="local_sgd:2"),
            "`Accumulate` alone can be combined with ModelParallelStrategy",
        ),
        (dict(shard="weights"), "`shard` must be None"),
        (dict(shard="optimizer", topology="flat"), "takes either `shard` or `topology`"),
    ],
)
def test_strategies(given, text):
    with pytest.raises(ValueError, match=f"(?s){text}.*Received: "):
        psp.ModelParallelStrategy(**given)


def test_data_of_a_row_differ():
    one, other = ("array", {"rows": 8}), ("array", {"rows": 9})
    check_same_in_rows([0, 0, 1, 1], [one, one, other, other], WORKERS)
    with pytest.raises(ValueError, match="worker-1 and worker-2 train one copy.*Received: "):
        check_same_in_rows([0, 0, 1, 1], [one, one, other, one], WORKERS)


def test_one_process_trains_alone():
    mesh = psp.DeviceMesh((2, 2), AXES)
    strategy = psp.ModelParallelStrategy(
        layout_map={".*kernel": (None, "model")},
        mesh=mesh,
        shard="all",
        compression={"gradients": "int8", "weights": "bf16"},
    )
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
    assert model.get_weights()[0].shape == (2, 3)
    assert "mesh=(2, 2)" in repr(strategy) and strategy.num_replicas_in_sync == 1


def test_elementwise_activations():
    known = [keras.activations.gelu, keras.activations.tanh, None]
    assert all(map(is_elementwise, known))
    others = [keras.activations.softmax, keras.activations.log_softmax, lambda x: x]
    assert not any(map(is_elementwise, others))
