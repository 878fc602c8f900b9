"""Compressed training on workers, beside what the compressors' papers say it computes."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from tests.all_reduce import compression_cases as cases
from tests.all_reduce.compression_cases import COMPRESSORS, FACTORS, STEPS, linear, problem
from tests.support.cluster import run
from tests.support.results import assert_all_close, assert_same, weights_of
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

LAYER = {"kernel": (9, 120), "bias": (120,)}


def compressor_of(name):
    return compression.with_error_feedback(compression.get(COMPRESSORS[name]))


def simulated(name, workers):
    """The workers' training in one process: gradients by hand, compressors as plain functions."""
    kernel, bias = (tf.constant(w) for w in linear("sgd").get_weights())
    x, y = problem()
    by_route = _routes(compressor_of(name))
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


NAMES = ["bf16", "int8", "topk", "powersgd", "by_variable"]


def check_weights(name, results):
    workers, found = len(results), weights_of(results.first)
    # Sums in another order may fall on the other side of a rounding; nearly all may not.
    for weight, expected in zip(found, simulated(name, workers), strict=True):
        close = np.isclose(weight, expected, rtol=1e-5, atol=2e-5)
        assert close.mean() > 0.99, np.abs(weight - expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_bytes_are_those_of_the_compressor(name):
    results = run("ar2", cases.compressed, name=name)
    check_weights(name, results)
    for key, shape in LAYER.items():
        chosen = compressor_of(name).for_variable(f"linear/{key}", shape, "float32")
        whole = 4 * int(np.prod(shape))
        sizes = [chosen.wire_bytes(shape, "float32", s) if chosen else whole for s in range(STEPS)]
        logical, compressed, wire = results.first[key]
        assert (logical, compressed) == (STEPS * whole, sum(sizes))
        # Between two workers, a ring sends each payload once, and so do the other ways.
        assert wire == pytest.approx(compressed, abs=20 * STEPS)


@functools.cache
def of_embeddings(kind):
    return run("ar2", cases.embeddings, kind=kind)


# How far weights may be from those without a compressor, and the bytes of a row with its index.
@pytest.mark.parametrize(
    "kind, tolerance, row_bytes",
    [
        *extended(("repeated", 1e-6, 24 + 4)),
        # Six bytes are filled up to whole words.
        ("int8", 0.05, 8 + 4 + 4),
    ],
)
def test_rows_of_embeddings_are_compressed_by_row(kind, tolerance, row_bytes):
    none, found = of_embeddings("none").first, of_embeddings(kind).first
    logical, compressed = none["own bytes"]
    rows = logical // (6 * 4 + 4)
    # Six batches of 4 ids in each of 4 (1 or 2 in the last) rows: 22 rows of one worker.
    ids = np.random.default_rng(3).integers(0, 50, size=(48, 4))
    own = [ids[i : i + 4] for i in range(0, 40, 8)]
    assert rows in [sum(len(np.unique(part)) for part in [*own, ids[40:end]]) for end in (41, 42)]
    assert compressed == rows * 28
    if kind == "repeated":
        # An optimizer that does not just add them up gets rows as often as they were looked up.
        assert rows < found["own bytes"][1] // row_bytes in (4 * 21, 4 * 22)
    else:
        assert found["own bytes"][1] == rows * row_bytes
    for one, other in zip(weights_of(found), weights_of(none), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
        assert tolerance < 1e-3 or np.any(one != other)


# With int8, `test_updates.py` resumes.
@pytest.mark.parametrize("name", ["topk_momentum", *extended("powersgd")])
def test_resumed_training_is_as_if_never_interrupted(name):
    found = run("ar2", cases.interrupted, name=name).first
    assert_same(weights_of(found, "resumed"), weights_of(found, "whole"))
    if name == "powersgd":
        # One worker's file was lost, and so all of them began with empty residuals.
        lost, whole = found["lost/0"], found["whole/0"]
        assert not np.array_equal(lost, whole)
        np.testing.assert_allclose(lost, whole, atol=0.1)


@pytest.mark.extended
def test_residuals_in_checkpoints_of_the_scripts_own():
    found = run("ar2", cases.by_hand).first
    assert_same(weights_of(found, "resumed"), weights_of(found, "whole"))


@pytest.mark.extended
def test_sums_in_pieces_are_those_of_the_whole():
    whole, pieces = (run("ar2", cases.pieces, bucket_bytes=size) for size in (1 << 30, 1000))
    assert_same(list(pieces.first.values()), list(whole.first.values()))


@pytest.mark.extended
def test_powersgd_computes_the_same_of_gradients_that_it_does_not_make_whole():
    of_factors, whole = (run("ar2", cases.wide, made_whole=kind).first for kind in (False, True))
    assert_all_close(weights_of(of_factors), weights_of(whole), 1e-3, 1e-4)
    assert of_factors["sent"] == whole["sent"]
    # One for each of two kernels, whenever a step is traced.
    assert of_factors["sums"] >= 2 and whole["sums"] == 0


@functools.cache
def of_factors(layout, kind):
    return run(layout, cases.factors, kind=kind)


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout, kind, tolerance",
    [
        ("ar2", "all", 2e-6),
        *extended(("ar2", "of half no products", 5e-3)),
        *extended(("ar4", "of halves", 2e-2)),
    ],
)
def test_factors_add_up_to_the_sum_of_gradients(layout, kind, tolerance):
    results, exact = of_factors(layout, kind), of_factors(layout, "none").first
    assert_all_close(weights_of(results.first), weights_of(exact), 1e-5, tolerance)
    if tolerance > 1e-3:
        assert np.any(results.first["weights/0"] != exact["weights/0"])
    if kind == "of half no products":
        assert results.first["how first/kernel"] == "Cast(dtype='float16')"
        assert results.first["own bytes first/kernel"][0] == 14 * 64 * 96 * 2
    else:
        check_bytes_of_factors(results, FACTORS[kind][0])


def check_bytes_of_factors(results, compressor):
    """They are those of the rows."""
    workers, size = len(results), 4 if compressor == "factors" else 2
    # Two epochs of six batches of eight rows and one of one row, which the first worker has.
    all_rows = [2 * (6 * 8 // workers + (rank == 0)) for rank in range(workers)]
    for rows, found in zip(all_rows, results.values()):
        assert found["how first/kernel"] == repr(compression.get(compressor))
        sent, wire, later = found["own bytes first/kernel"]
        assert sent == rows * (64 + 96) * size
        # What is gathered has as many rows of each as the one with the most, and up to an eighth.
        least = (workers - 1) * all_rows[0] * (64 + 96) * size
        assert least <= wire <= 1.125 * least
        # Two batches of two hundred rows have more bytes of factors than of gradients.
        assert later - sent == 2 * 64 * 96 * size
        # An odd number of halves takes a word more; one column is never worth it.
        of_row = (96 + 95) * 4 if size == 4 else (96 + 96) * 2
        assert found["own bytes second/kernel"][0] == rows * of_row
        assert found["own bytes last/kernel"][0] == 2 * 7 * 95 * size
        assert found["how first/bias"] == "None"


@pytest.mark.extended
def test_variables_of_the_same_path_have_residuals_of_their_own():
    names = ["hidden", "hidden"], ["hidden_0", "hidden_1"]
    same, unique = (run("ar2", cases.towers, names=pair).first for pair in names)
    assert_same(list(same.values()), list(unique.values()))


@pytest.mark.parametrize("name, scaled", [("int8", True), *extended(("powersgd", False))])
def test_numbers_that_are_not_finite_reach_the_optimizer(name, scaled):
    found = run("ar2", cases.not_finite, name=name, scaled=scaled).first
    assert np.isfinite(found["weights/0"]).all() == scaled


def test_accumulated_gradients_are_sent_once():
    whole = 4 * sum(int(np.prod(shape)) for shape in LAYER.values())
    assert run("ar2", cases.accumulated, name="powersgd").first["sent"] == STEPS * whole


# What four workers show and two do not: cuts, what is gathered, and exchanged in turns.
@pytest.mark.extended
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_weights_of_four_workers_are_those_of_the_compressor(name):
    check_weights(name, run("ar4", cases.compressed, name=name))
