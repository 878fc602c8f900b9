"""Compressed training on workers, beside what the compressors' papers say it computes."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import keras_psplus
from keras_psplus import compression
from keras_psplus.cluster.testing import run_in_processes
from tests.all_reduce.compression_job import (
    CASES,
    COMPRESSORS,
    FACTORS,
    FACTORS_OF_FOUR,
    NOT_FINITE,
    OF_FOUR,
    RESUMED,
    STEPS,
    linear,
    problem,
)
from tests.selection import cases, of_kind

JOB = pathlib.Path(__file__).with_name("compression_job.py")
LAYER = {"kernel": (9, 120), "bias": (120,)}


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    return results_of(2, tmp_path_factory.mktemp("compression"), *cases(request))


@pytest.fixture(scope="module")
def run_of_four(request, tmp_path_factory):
    names = cases(request, run_name="run_of_four")
    names += cases(request, "test_four_workers_end_with_the_same_bits")
    return results_of(4, tmp_path_factory.mktemp("four"), *names)


def results_of(workers, folder, *args):
    logs = run_in_processes(
        JOB,
        workers=workers,
        timeout=560,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        args=["--out", folder, *args],
    ).logs
    results = []
    for i in range(workers):
        path = pathlib.Path(folder, f"worker-{i}.json")
        assert path.exists(), logs[f"worker-{i}"][-8000:]
        with np.load(folder / f"worker-{i}.npz") as arrays:
            results.append((dict(arrays), json.loads(path.read_text())))
    return results


def simulated(name, workers):
    """The workers' training in one process: gradients by hand, compressors as plain functions."""
    compressor = compression.with_error_feedback(compression.get(COMPRESSORS[name]))
    kernel, bias = (tf.constant(w) for w in linear("sgd").get_weights())
    x, y = problem()
    by_route = _routes(compressor)
    states = [None] * workers
    for step in range(STEPS):
        rows = slice(8 * step, 8 * step + 8)
        shares = zip(np.split(x[rows], workers), np.split(y[rows], workers))
        grads = []
        for part, target in shares:
            error = part @ kernel + bias - target
            scale = 2.0 / error.shape.num_elements()
            grads.append(
                {
                    "kernel": scale * tf.matmul(part, error, transpose_a=True),
                    "bias": scale * tf.reduce_sum(error, 0),
                }
            )
        means, states = by_route(grads, states, step)
        kernel, bias = kernel - 0.5 * means["kernel"], bias - 0.5 * means["bias"]
    return kernel.numpy(), bias.numpy()


def _routes(compressor):
    chosen = {k: compressor.for_variable(f"linear/{k}", s, "float32") for k, s in LAYER.items()}
    split = [k for k in ("bias", "kernel") if chosen[k] and not chosen[k].reducible]
    split = [k for k in split if chosen[k].supports_reduce_scatter]

    def means(grads, states, step):
        result, new = {}, [dict(s or {}) for s in states]
        if split:
            result, new = _split_means(chosen[split[0]], split, grads, new, step)
        for key in set(LAYER) - set(split):
            c, own = chosen[key], [g[key] for g in grads]
            if c is None:
                result[key] = sum(own) / len(own)
                continue
            before = [s.get(key) or c.init(LAYER[key], tf.float32) for s in new]
            if c.reducible and step < c.start_step:
                result[key], after = sum(own) / len(own), before
            elif c.reducible:
                result[key], after = _lockstep(c, own, before, step)
            else:
                payloads, after = zip(*(c.encode(g, s, step) for g, s in zip(own, before)))
                decoded = [c.decode(p, LAYER[key], tf.float32, step) for p in payloads]
                result[key] = sum(decoded) / len(decoded)
            for state, value in zip(new, after):
                state[key] = value
        return result, new

    return means


def _lockstep(compressor, tensors, states, step):
    generators = [compressor.exchange(t, s, step) for t, s in zip(tensors, states)]
    replies = [None] * len(tensors)
    while True:
        asked, ended = [], []
        for generator, reply in zip(generators, replies):
            try:
                asked.append(generator.send(reply))
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            return ended[0][0], [state for _, _, state in ended]
        means = [sum(t / tf.cast(len(each), t.dtype) for t in each) for each in zip(*asked)]
        replies = [means] * len(tensors)


def _split_means(compressor, keys, grads, states, step):
    """Each worker quantises what it sends of all parts, and then the mean of its own part."""
    inner, server = compressor.inner, compression.ErrorFeedback(compressor.inner)
    size = sum(np.prod(LAYER[k]) for k in keys)
    workers = len(grads)
    width = -(-size // workers)
    if width > 32 * inner.block_size:
        width += -width % inner.block_size

    def coded(feedback, tensor, state):
        total = feedback.add(tensor, state)
        payload = inner.encode_rows(total, step)
        decoded = inner.decode_rows(payload, (width,), tf.float32, step)
        return decoded, feedback.keep(tensor, total, payload, decoded, (), state)

    received = []
    for worker in range(workers):
        flat = tf.concat([tf.reshape(grads[worker][k], [-1]) for k in keys], 0)
        rows = tf.reshape(tf.pad(flat, [[0, workers * width - size]]), [workers, width])
        before = states[worker].get("w") or compressor.init([workers, width], tf.float32)
        decoded, states[worker]["w"] = coded(compressor, rows, before)
        received.append(decoded)
    means = []
    for worker in range(workers):
        mean = tf.reduce_mean(tf.stack([r[worker] for r in received]), 0)[tf.newaxis]
        before = states[worker].get("s") or server.init([1, width], tf.float32)
        decoded, states[worker]["s"] = coded(server, mean, before)
        means.append(decoded)
    flat = tf.reshape(tf.concat(means, 0), [-1])[:size]
    parts = tf.split(flat, [int(np.prod(LAYER[k])) for k in keys])
    return {k: tf.reshape(p, LAYER[k]) for k, p in zip(keys, parts)}, states


def in_both_runs(two, four):
    """Values of a test's parameters `run_name` and `name`."""
    return [
        pytest.param(run_name, *param.values, marks=param.marks)
        for run_name, params in (("run", two), ("run_of_four", four))
        for param in params
    ]


@pytest.mark.parametrize(
    "run_name, name",
    in_both_runs(of_kind("compressor", COMPRESSORS), of_kind("compressor", OF_FOUR)),
)
def test_training_computes_what_the_compressor_says(run_name, name, request):
    results = request.getfixturevalue(run_name)
    expected = simulated(name, len(results))
    arrays, _ = results[0]
    # Sums of four are rounded to the 8 bits of bfloat16 on their way, in an order of their own.
    atol = 5e-4 if name == "bf16" and len(results) > 2 else 2e-5
    # Sums in another order may fall on the other side of a rounding; nearly all may not.
    for i, weight in enumerate(expected):
        close = np.isclose(arrays[f"{name}/{i}"], weight, rtol=1e-5, atol=atol)
        assert close.mean() > 0.99, np.abs(arrays[f"{name}/{i}"] - weight).max()


@pytest.mark.cases(*CASES, others=True)
def test_workers_end_with_the_same_bits(run):
    (first, traffic), (second, other_traffic) = run
    for name in traffic.keys() & COMPRESSORS.keys():
        assert traffic[name] == other_traffic[name]
    assert set(first) == set(second)
    for key, value in first.items():
        if "embeddings alone" not in key:
            np.testing.assert_array_equal(value, second[key], err_msg=key)
    assert not np.array_equal(first["embeddings alone/0"], second["embeddings alone/0"])


@pytest.mark.cases(*(f"compressor {name}" for name in OF_FOUR), "factors")
def test_four_workers_end_with_the_same_bits(run_of_four):
    first = run_of_four[0]
    assert {key.partition("/")[0] for key in first[0]} >= set(OF_FOUR)
    for arrays, traffic in run_of_four[1:]:
        assert {name: traffic[name] for name in OF_FOUR} == {
            name: first[1][name] for name in OF_FOUR
        }
        for key, value in first[0].items():
            np.testing.assert_array_equal(arrays[key], value, err_msg=key)


@pytest.mark.parametrize("name", of_kind("compressor", COMPRESSORS))
def test_bytes_are_those_of_the_compressor(name, run):
    compressor = compression.with_error_feedback(compression.get(COMPRESSORS[name]))
    for key, shape in LAYER.items():
        chosen = compressor.for_variable(f"linear/{key}", shape, "float32")
        whole = 4 * int(np.prod(shape))
        sizes = [chosen.wire_bytes(shape, "float32", s) if chosen else whole for s in range(STEPS)]
        logical, compressed, wire = run[0][1][name][key]
        assert (logical, compressed) == (STEPS * whole, sum(sizes))
        # Between two workers, a ring sends each payload once, and so do the other ways.
        assert wire == pytest.approx(compressed, abs=20 * STEPS)


@pytest.mark.cases("embeddings")
def test_rows_of_embeddings_are_compressed_by_row(run):
    results, traffic = run[0]
    none = [results[f"embeddings none/{i}"] for i in range(3)]
    for i, weight in enumerate(none):
        np.testing.assert_array_equal(results[f"embeddings topk whole/{i}"], weight)
        for name, tolerance in (("bf16", 0.02), ("int8", 0.05)):
            np.testing.assert_allclose(
                results[f"embeddings {name}/{i}"], weight, atol=tolerance, err_msg=name
            )
            assert np.any(results[f"embeddings {name}/{i}"] != weight)
    # Six batches of 4 ids in each of 4 (1 or 2 in the last) rows: 22 rows of one worker.
    ids = np.random.default_rng(3).integers(0, 50, size=(48, 4))
    own = [ids[i : i + 4] for i in range(0, 40, 8)]
    rows = traffic["embeddings none"]["table"][0] // (6 * 4 + 4)
    assert rows in [sum(len(np.unique(part)) for part in [*own, ids[40:end]]) for end in (41, 42)]
    assert traffic["embeddings none"]["table"][1] == rows * 28
    # An optimizer that does not just add them up gets rows as often as they were looked up.
    for i, weight in enumerate(none):
        repeated = results[f"embeddings repeated/{i}"]
        np.testing.assert_allclose(repeated, weight, rtol=0, atol=1e-6)
    repeated = traffic["embeddings repeated"]["table"][1] // 28
    assert repeated in (4 * 21, 4 * 22) and repeated > rows
    assert traffic["embeddings bf16"]["table"][1] == rows * (12 + 4)
    # What rows would lose of theirs, no later step makes up for.
    assert traffic["embeddings topk"]["table"][1] == rows * 28
    assert traffic["embeddings topk whole"]["table"][1] == rows * (36 + 4)
    # Six bytes are filled up to whole words.
    assert traffic["embeddings int8"]["table"][1] == rows * (8 + 4 + 4)


@pytest.mark.parametrize("name", of_kind("resumed", RESUMED))
def test_resumed_training_is_as_if_never_interrupted(name, run):
    for worker, _ in run:
        for i in range(2):
            whole = worker[f"whole {name}/{i}"]
            np.testing.assert_array_equal(worker[f"resumed {name} False/{i}"], whole)
    # One worker's file was lost, and so all of them began with empty residuals.
    if name == "powersgd":
        lost, whole = run[0][0][f"resumed {name} True/0"], run[0][0][f"whole {name}/0"]
        assert not np.array_equal(lost, whole)
        np.testing.assert_allclose(lost, whole, atol=0.1)


@pytest.mark.cases("pieces")
def test_sums_in_pieces_are_those_of_the_whole(run):
    results, traffic = run[0]
    np.testing.assert_array_equal(results["sent pieces/0"], results["sent whole/0"])
    assert traffic["sent pieces"] == traffic["sent whole"]


@pytest.mark.cases("wide")
def test_powersgd_computes_the_same_of_gradients_that_it_does_not_make_whole(run):
    results, traffic = run[0]
    for i in range(6):
        of_factors, whole = (results[f"wide {kind}/{i}"] for kind in ("of factors", "made whole"))
        np.testing.assert_allclose(of_factors, whole, rtol=1e-3, atol=1e-4)
    of_factors, whole = (traffic[f"wide {kind}"] for kind in ("of factors", "made whole"))
    assert of_factors["all"] == whole["all"]
    # One for each of two kernels, whenever a step is traced.
    assert of_factors["sums"] >= 2 and whole["sums"] == 0


@pytest.mark.cases("factors")
@pytest.mark.parametrize("run_name", ["run", "run_of_four"])
def test_factors_add_up_to_the_sum_of_gradients(run_name, request):
    results, traffic = request.getfixturevalue(run_name)[0]
    kinds = FACTORS if run_name == "run" else FACTORS_OF_FOUR
    halves = {"of halves": 2e-2, "of half no products": 5e-3}
    for kind in kinds:
        tolerance = halves.get(kind, 2e-6)
        for i in range(6):
            weight, exact = results[f"factors {kind}/{i}"], results[f"factors none/{i}"]
            np.testing.assert_allclose(weight, exact, rtol=1e-5, atol=tolerance, err_msg=kind)
    for kind in halves.keys() & set(kinds):
        assert np.any(results[f"factors {kind}/0"] != results["factors none/0"])
    if "of loops" in kinds:
        assert traffic["factors all"] == traffic["factors of loops"]


@pytest.mark.cases("factors")
@pytest.mark.parametrize("run_name", ["run", "run_of_four"])
@pytest.mark.parametrize("kind", ["all", "of halves"])
def test_bytes_of_factors_are_those_of_the_rows(run_name, kind, request):
    results = request.getfixturevalue(run_name)
    workers, bytes_of_number = len(results), 4 if kind == "all" else 2
    compressor = compression.get("factors" if kind == "all" else "factors:bf16")
    # Two epochs of six batches of eight rows and one of one row, which the first worker has.
    rows = [2 * (6 * 8 // workers + (rank == 0)) for rank in range(workers)]
    most = 2 * (6 * 8 // workers + 1)
    for rank, (_, traffic) in enumerate(results):
        described, (sent, wire), later = traffic[f"factors {kind}"]["first/kernel"]
        assert described == repr(compressor)
        assert sent == rows[rank] * (64 + 96) * bytes_of_number
        # What is gathered has as many rows of each as the one with the most, and up to an eighth.
        least = (workers - 1) * most * (64 + 96) * bytes_of_number
        assert least <= wire <= 1.125 * least
        # Two batches of two hundred rows have more bytes of factors than of gradients.
        assert later - sent == 2 * 64 * 96 * bytes_of_number
        # An odd number of halves takes a word more; one column is never worth it.
        assert traffic[f"factors {kind}"]["second/kernel"][1][0] == rows[rank] * (
            (96 + 95) * 4 if kind == "all" else (96 + 96) * 2
        )
        last = traffic[f"factors {kind}"]["last/kernel"]
        assert last[1][0] == 2 * 7 * 95 * bytes_of_number
        assert traffic[f"factors {kind}"]["first/bias"][0] is None


@pytest.mark.cases("factors")
def test_what_is_no_product_is_sent_as_it_is(run):
    _, traffic = run[0]
    for kind, compressor, size in (
        ("of no products", None, 4),
        ("of half no products", "Cast(dtype='float16')", 2),
    ):
        described, (sent, _), _ = traffic[f"factors {kind}"]["first/kernel"]
        assert (described, sent) == (compressor, 14 * 64 * 96 * size)


@pytest.mark.cases("towers")
def test_variables_of_the_same_path_have_residuals_of_their_own(run):
    for i in range(4):
        same, unique = (run[0][0][f"towers {kind}/{i}"] for kind in ("same", "unique"))
        np.testing.assert_array_equal(same, unique)


@pytest.mark.cases("own_checkpoint")
def test_residuals_in_checkpoints_of_the_scripts_own(run):
    for worker, _ in run:
        np.testing.assert_array_equal(worker["resumed by hand/0"], worker["whole by hand/0"])


@pytest.mark.parametrize("name", of_kind("not_finite", NOT_FINITE))
def test_numbers_that_are_not_finite_reach_the_optimizer(name, run):
    results, _ = run[0]
    if name != "bf16":
        assert np.isfinite(results[f"not finite {name} True/0"]).all()
    if name != "topk":
        assert not np.isfinite(results[f"not finite {name} False/0"]).all()


@pytest.mark.cases("few_not_finite")
def test_few_numbers_that_are_not_finite_reach_the_optimizer(run):
    for results, _ in run:
        wrong = np.isnan(results["few not finite/0"])
        assert wrong[:, 17].all() and wrong.sum() == 400


@pytest.mark.cases("accumulated")
def test_accumulated_gradients_are_sent_once(run):
    _, traffic = run[0]
    for name in ("int8", "topk", "powersgd"):
        whole = 4 * sum(int(np.prod(shape)) for shape in LAYER.values())
        assert traffic[f"accumulated {name}"]["all"] == STEPS * whole


@pytest.mark.parametrize("wrong", ["int7", "topk:2", "powersgd:0", "int8:0", 8, {"*": "gzip"}])
def test_wrong_compressors_are_refused_before_anything_starts(wrong):
    with pytest.raises(ValueError, match="Received: "):
        keras_psplus.MultiWorkerMirroredStrategy(compression=wrong)
    assert "TF_CONFIG" not in os.environ
