"""Weights cut along a mesh: equal to one process, in files too, and of known size."""

import re

import numpy as np
import pytest

from tests.multi_process.test_eager_gradients import reads_between_steps
from tests.sharding import cases as shares
from tests.sharding.checks import check_compressed, check_files
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended
from tests.tensor_parallel import cases

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TOLERANCE = 2e-5
# Where losses do not depend on keys' biases, Adam would move these by rounding errors.
MODELS = ["mlp/adamw"]
SAID = {
    "mlp/adamw": [
        "over 1 x 2 workers: 7 of 11 variables are cut",
        "matched by no weight: ",
        "'adam_w' keeps the slots of 7 cut weights in parts",
    ],
}


@pytest.mark.parametrize("name", [*MODELS, *extended("odd/sgd", "own_step", "own_layer")])
def test_two_workers_equal_one_process(name):
    found = equals_one_process("tp2", cases.trained, name=name)
    for text in SAID.get(name, ()):
        assert text in found.logs["worker-0"]


def test_losses_over_classes_that_are_cut():
    results = run("tp2", cases.of_vocabulary)
    # Three numbers of each row for a loss, two for its accuracy; outputs of the hidden layer, and
    # the logits of which one metric needs all.
    wholes, small = ["[6, 4]", "[4]"], ["[6, 3]", "[6, 2]", *3 * ["[3]", "[2]"]]
    for task, found in results.items():
        # Steps of training and of evaluation.
        assert sorted(found.pop("gathered").tolist()) == sorted(2 * [*small, *wholes])
        text = r"logits of shape \(\w+, 8\) are gathered in each step, as '"
        assert len(re.findall(text, results.logs[task])) == (task == "worker-0")
    assert_close(results.first, reference(cases.of_vocabulary), TOLERANCE)


@pytest.mark.extended
def test_layers_that_talk_to_no_other_worker_are_compiled():
    found = run("tp2", cases.trained, name="mlp/adamw", jit_compile=True)
    assert_close(found.first, reference(cases.trained, name="mlp/adamw"), TOLERANCE)
    for log in found.logs.values():
        lines = re.findall("^compiled: (.*)", log, re.MULTILINE)
        assert "layer_normalization" in {one for line in lines for one in line.split()}


def test_each_worker_has_its_part():
    expected = reference(cases.in_parts)
    for found in run("tp2", cases.in_parts).values():
        np.testing.assert_array_equal(2 * found.pop("kept"), found.pop("whole"))
        assert found.pop("slots of a weight") == 1  # its momentum
        # Gathered are positions, cut by width, three numbers of each row for the loss, and two for
        # its accuracy. Forward, a table and two layers are summed; backward, the gradients of what
        # two cut layers multiply, and those of the head.
        assert sorted(found.pop("gathered").tolist()) == ["[2]", "[3]", "[6, 4]"]
        assert found.pop("summed") == 1 + 2 + 2 + 1
        assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("other", extended("plain", "tp4"))
def test_files_go_on_elsewhere(other, tmp_path):
    check_files("tp2", tmp_path, other)


@pytest.mark.extended
def test_accumulated_rows_equal_those_of_one_process():
    equals_one_process("tp2", shares.accumulated, name="places")


@pytest.mark.extended
def test_accumulated_updates_equal_those_of_one_process():
    equals_one_process("tp4", shares.accumulated, name="two_optimizers")


@pytest.mark.extended
def test_rows_divide_batches():
    equals_one_process("tp4", cases.trained, name="own_step")


@pytest.mark.parametrize("layout", ["tp4_all", *extended("tp4_shards")])
def test_what_a_worker_keeps_is_cut_along_rows_and_columns(layout):
    expected = reference(cases.in_pieces)
    for found in run(layout, cases.in_pieces).values():
        parts = found.pop("parts")
        # Of biases, the last piece is filled up.
        pieces = -(-parts // 2)
        weights = parts if layout == "tp4_shards" else pieces
        for name, sizes in {"weights": weights, "first": pieces, "second": pieces}.items():
            np.testing.assert_array_equal(found.pop(f"kept/{name}"), sizes)
        assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("frees", [True, *extended(False)])
def test_units_gather_along_columns_and_meet_along_rows(frees):
    results = run("tp4_all", cases.in_units, reshard_after_forward=frees)
    for found in results.values():
        # Sums of two row cuts' outputs, and of the gradient of what the second pair computes with;
        # what a unit leaves in parts is gathered for no other.
        assert sorted(found.pop("summed").tolist()) == ["[3]", "[6]", "[6]"]
        assert found.pop("gathered").size == 0
        # Each piece is gathered and its gradient scattered; kernels that were freed are gathered
        # once more in backward, but for the last unit's, which is still there.
        pieces = found.pop("pieces")
        again = pieces[0] + pieces[2] + pieces[4] if frees else 0
        assert found.pop("wire") == 4 * (2 * pieces.sum() + again)
    assert_close(results.first, reference(cases.in_units), TOLERANCE)


# Optimizers whose weights are whole on one worker each come last.
IN_PIECES = {
    "tp4_all": [
        *("mlp/adamw", "mlp/counting", "odd/adagrad", "own_step", "transformer/momentum_clipnorm"),
        *("odd/muon", "tied/muon_steps", "one/adafactor"),
    ],
    "tp4_shards": [
        *("mlp/average", "mlp/steps", "odd/sgd", "own_layer", "tied/adamw", "own_step/muon"),
        "mlp/lamb",
    ],
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout, name", [(layout, name) for layout, names in IN_PIECES.items() for name in names]
)
def test_pieces_equal_one_process(layout, name):
    equals_one_process(layout, cases.trained, name=name)


def test_steps_of_a_loop_with_owners():
    """Of what a row gathers at the end of a step, an owner's row uses no more than others do."""
    equals_one_process("tp4_all", reads_between_steps, name="muon")


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["tp4", "tp4_shards", "tp4_all"])
def test_all_workers_skip_an_update_that_overflows_on_one(layout):
    found = equals_one_process(layout, cases.trained, name="mlp/overflow", scale=40).first
    assert 0 < found["slots/2"] < 6


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["tp4_shards", "tp4_all"])
def test_losses_over_classes_of_weights_in_pieces(layout):
    found = run(layout, cases.of_vocabulary).first
    del found["gathered"]
    assert_close(found, reference(cases.of_vocabulary), TOLERANCE)


@pytest.mark.extended
def test_compiled_units_of_a_mesh_equal_one_process():
    found = run("tp4_all", cases.trained, name="transformer/adam", jit_compile=True)
    assert_close(found.first, reference(cases.trained, name="transformer/adam"), TOLERANCE)


@pytest.mark.extended
def test_gradients_and_new_values_in_fewer_bytes():
    found = run("tp4_shards_int8", cases.trained, name="mlp/adamw").first
    expected = reference(cases.trained, name="mlp/adamw")
    assert_close(found, expected, 0.05)


@pytest.mark.extended
def test_what_is_gathered_in_fewer_bytes():
    # Parts of a row's two workers, small enough to be still there in backward.
    kernels, biases = 64 * 48 + 96 * 5, 96 + 10
    gradients = kernels * (1 + 4 / 256) + 4 * biases
    check_compressed("tp4_all", lambda *_: gradients / 2 + kernels + biases)


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["tp4_shards", "tp4_all"])
def test_mixed_precision_with_a_loss_scale(layout):
    args = {"name": "transformer/loss_scale", "policy": "mixed_float16"}
    found = run(layout, cases.trained, **args).first
    expected = reference(cases.trained, **args)
    assert_close(found, expected, 1e-2)
    for name in expected:
        assert found[name].dtype == expected[name].dtype
    # Steps, the scale and how long it has been there.
    for i in range(3):
        assert found[f"slots/{i}"] == expected[f"slots/{i}"]


@pytest.mark.extended
@pytest.mark.parametrize("optimizer, filled", [("adam", 0), ("lamb", 0.3)])
def test_the_kernel_counts_the_bytes_of_the_formula(optimizer, filled):
    for found in run("tp4_all", cases.on_links, optimizer=optimizer).values():
        # Owners have not as many bytes, and rows that they scatter and gather are filled up.
        assert 1 <= found["own_counted"] / found["own_columns"] <= 1 + filled
        both = found["own_counted"] + found["own_rows"]
        assert found["own_wire"] == pytest.approx(both, rel=0.05)


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["tp4_shards", "tp4_all"])
@pytest.mark.parametrize("name", ["places", "two_optimizers", "muon"])
def test_accumulated_updates_of_pieces_equal_those_of_one_process(layout, name):
    equals_one_process(layout, shares.accumulated, name=name)


@pytest.mark.extended
@pytest.mark.parametrize("other", ["plain", "tp2", "opt2"])
def test_pieces_go_on_elsewhere(other, tmp_path):
    check_files("tp4_shards", tmp_path, other)


@pytest.mark.extended
def test_slots_with_owners_go_on_elsewhere(tmp_path):
    check_files("tp4_all", tmp_path, "tp4_shards", name="muon")


@pytest.mark.extended
def test_files_of_a_mesh_go_from_mesh_to_mesh(tmp_path):
    check_files("tp4_all", tmp_path, "plain")
    paths = [str(tmp_path / f"{name}.keras") for name in ("all.worker-1", "4x1", "1x2", "alone")]
    expected = reference(shares.loaded, path=paths[0], epochs=3)
    for layout, path, to in zip(("tp4x1_all", "tp2", "plain"), paths, paths[1:]):
        found = run(layout, shares.loaded, path=path, to=to).first
    found = {name: value for name, value in found.items() if name.startswith("later")}
    assert_close(found, {name: expected[name] for name in found}, TOLERANCE)


@pytest.mark.extended
def test_groups_of_rows_equal_one_process():
    equals_one_process("tp8_topology", cases.trained, name="mlp/adamw")
