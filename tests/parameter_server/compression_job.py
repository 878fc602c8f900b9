"""Compressed gradients and reads with one worker and two parameter servers, in one process.

compression_job.py FOLDER SHARDS [BEHAVIOUR ...]

Each behaviour raises if it is not as it should be. What they raised is written to `failures.json`
and looked at by `test_compression.py`. A model's name says what it is compressed by, so that one
strategy serves all; one worker's results are those of the same steps taken by hand, here.
"""

import gc
import json
import pathlib
import sys
import traceback

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus import compression
from keras_psplus.cluster.in_process import InProcessCluster

BEHAVIOURS = {}
WIDTH, CLASSES, BATCH = 12, 4, 20

rng = np.random.default_rng(0)
labels = rng.integers(0, CLASSES, 200).astype("int32")
rows = (rng.normal(size=(200, WIDTH)) + 3.0 * np.eye(CLASSES, WIDTH)[labels]).astype("float32")
words = rng.integers(0, 600, (200, 6)).astype("int32")


class Levels(compression.Compressor):
    """One of one's own: 256 levels between the smallest and the largest element."""

    error_feedback = True
    supports_values = True

    def encode(self, tensor, state, step):
        low = tf.reduce_min(tensor)
        unit = (tf.reduce_max(tensor) - low) / 255.0
        levels = tf.round((tensor - low) / tf.maximum(unit, 1e-30))
        return (tf.cast(levels, tf.uint8), tf.stack([low, unit])), state

    def decode(self, payload, shape, dtype, step):
        levels, scale = payload
        return tf.cast(scale[0] + scale[1] * tf.cast(levels, tf.float32), dtype)

    def wire_bytes(self, shape, dtype, step=None):
        return tf.TensorShape(shape).num_elements() + 8


LOSSY = {
    "bf16": compression.Cast("bfloat16"),
    "fp16": compression.Cast("float16"),
    "int8": compression.Int8(64),
    "qsgd": compression.Int8(64, stochastic=True),
    "sign": compression.Sign(32),
    "topk": compression.TopK(0.2),
    "topk_corrected": compression.TopK(0.2, momentum_correction=0.5),
    "topk_warmup": compression.TopK(0.1, warmup_epochs=2, steps_per_epoch=2),
    "randomk": compression.RandomK(0.5),
    "powersgd": compression.PowerSGD(1, min_compression_rate=1),
    "powersgd_late": compression.PowerSGD(1, min_compression_rate=1, start_step=2),
    "own": Levels(),
}
READ = {"read_bf16": compression.Cast("bfloat16"), "read_int8": compression.Int8(8)}
READ["read_own"] = Levels()


def strategy_for(cluster, shards):
    partitioner = None
    if shards:
        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(shards)
    push = {f"{name}/*": compressor for name, compressor in LOSSY.items()}
    push["exact*"] = compression.TopK(1.0)
    push["alone/*"] = compression.NoCommunication()
    pull = {f"{name}/*": compressor for name, compressor in READ.items()}
    return psp.ParameterServerStrategy(
        cluster.cluster_resolver,
        partitioner,
        compression=compression.ByVariable(push, min_size=1, min_rank=0),
        pull_compression=compression.ByVariable(pull, min_size=1, min_rank=2),
    )


def behaviour(function):
    BEHAVIOURS[function.__name__] = function
    return function


def dense(name, optimizer=None, **kwargs):
    layers = [
        keras.Input((WIDTH,)),
        keras.layers.Dense(16, "relu", name="hidden"),
        keras.layers.Dense(CLASSES, name="logits"),
    ]
    return compiled(layers, name, optimizer, **kwargs)


def embedded(name, optimizer=None, **kwargs):
    layers = [
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(600, 16),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(CLASSES),
    ]
    return compiled(layers, name, optimizer, **kwargs)


def compiled(layers, name, optimizer, **kwargs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(layers, name=name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **kwargs)
    return model


def batch(i, data=None):
    data = rows if data is None else data
    return data[i * BATCH : (i + 1) * BATCH], labels[i * BATCH : (i + 1) * BATCH]


def fit(model, data=None, **kwargs):
    options = dict(batch_size=BATCH, epochs=2, shuffle=False, verbose=0) | kwargs
    return model.fit(rows if data is None else data, labels, **options).history


def assert_same(found, expected, tolerance=1e-6):
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance, err_msg=f"weight {i}")


class ByHand:
    """One process that does to each gradient, and to what it reads, what should be done to it."""

    def __init__(self, model, like, push=None, pull=None):
        self._model, self._push, self._pull = model, compression.with_error_feedback(push), pull
        # Shards are compressed by themselves.
        self._cuts = [
            [part.shape[0] for part in getattr(v._value, "shards", [])]
            for v in like.trainable_variables
        ]
        self._states, self._step = {}, 0
        model.set_weights(like.get_weights())

    def train(self, x, y):
        variables = self._model.trainable_variables
        exact = [v.numpy() for v in variables]
        if self._pull is not None:
            for i, v in enumerate(variables):
                if len(v.shape) > 1:
                    v.assign(self._cut_up(i, v.value, lambda part, _: self._round(part)))
        with tf.GradientTape() as tape:
            loss = self._model.loss(y, self._model(x, training=True))
        gradients = tape.gradient(loss, [v.value for v in variables])
        for v, value in zip(variables, exact):
            v.assign(value)
        if self._push is not None:
            gradients = [self._cut_up(i, g, self._sent) for i, g in enumerate(gradients)]
        self._model.optimizer.apply(gradients, variables)
        self._step += 1
        return self._model.get_weights()

    def _cut_up(self, i, tensor, function):
        if isinstance(tensor, tf.IndexedSlices):
            if not self._push.compresses_rows:
                return tensor
            # Under SGD, an id's rows are summed first.
            ids, places = np.unique(tensor.indices, return_inverse=True)
            summed = np.zeros((len(ids), *tensor.values.shape[1:]), "float32")
            np.add.at(summed, places, tensor.values.numpy())
            payload = self._push.encode_rows(tf.constant(summed), self._number)
            values = self._push.decode_rows(payload, summed.shape[1:], tensor.dtype, self._number)
            return tf.IndexedSlices(values, tf.constant(ids), tensor.dense_shape)
        parts = tf.split(tensor, self._cuts[i]) if self._cuts[i] else [tensor]
        parts = [function(part, (i, k)) for k, part in enumerate(parts)]
        return tf.concat(parts, 0) if len(parts) > 1 else parts[0]

    @property
    def _number(self):
        return tf.constant(self._step, tf.int64)

    def _sent(self, gradient, key):
        shape, dtype = gradient.shape, gradient.dtype
        chosen = self._push.for_variable("", shape, dtype)
        if chosen is None:
            return gradient
        state = self._states.get(key, chosen.init(shape, dtype))
        payload, self._states[key] = chosen.encode(gradient, state, self._number)
        return chosen.decode(payload, shape, dtype, self._number)

    def _round(self, value):
        payload, _ = self._pull.encode(value, (), 0)
        return self._pull.decode(payload, value.shape, value.dtype, 0)


def compare_with_hand(strategy, name, make, data=None, steps=5, pull=None):
    with strategy.scope():
        model = make(name)
    with psp.single_process():
        by_hand = ByHand(make("by_hand"), model, LOSSY.get(name), pull)
    for i in range(steps):
        model.train_on_batch(*batch(i, data))
        assert_same(model.get_weights(), by_hand.train(*batch(i, data)), 2e-6)
    return model


def by_hand_case(name):
    def case(strategy):
        compare_with_hand(strategy, name, dense)

    case.__name__ = f"{name}_as_by_hand"
    behaviour(case)


# What changes its rate, draws from the step, or keeps more than a residual; "int8" and "sign" are
# compared below.
for _name in ("topk_corrected", "topk_warmup", "randomk", "powersgd_late", "own"):
    by_hand_case(_name)


@behaviour
def several_steps_of_one_call_as_by_hand(strategy):
    with strategy.scope():
        model = dense("sign", steps_per_execution=5)
    with psp.single_process():
        by_hand = ByHand(dense("by_hand"), model, LOSSY["sign"])
    fit(model, epochs=1)
    for i in range(10):
        weights = by_hand.train(*batch(i))
    assert_same(model.get_weights(), weights, 5e-6)


@behaviour
def rows_of_embeddings_as_by_hand(strategy):
    for name in ("int8", "sign"):
        compare_with_hand(strategy, name, embedded, words, steps=3)


@behaviour
def rounded_reads_as_by_hand(strategy):
    for name in ("read_bf16", "read_int8", "read_own"):
        model = compare_with_hand(strategy, name, dense, steps=3, pull=READ[name])
        if name == "read_bf16":
            # Evaluated and predicted by the rounded weights; the chief reads the exact ones.
            with psp.single_process():
                plain = dense("plain")
            plain.set_weights(
                [
                    tf.cast(tf.cast(w, tf.bfloat16), tf.float32) if w.ndim > 1 else w
                    for w in model.get_weights()
                ]
            )
            loss = model.evaluate(rows, labels, batch_size=BATCH, verbose=0)
            with psp.single_process():
                expected = plain.evaluate(rows, labels, verbose=0)
            np.testing.assert_allclose(loss, expected, atol=1e-5)
            predicted = [m.predict(rows, batch_size=50, verbose=0) for m in (model, plain)]
            np.testing.assert_allclose(*predicted, atol=1e-5)


@behaviour
def rounded_lookups_as_by_hand(strategy):
    compare_with_hand(strategy, "read_bf16", embedded, words, steps=3, pull=READ["read_bf16"])


@behaviour
def training_learns(strategy):
    # Of the others, every step is compared with the same taken by hand.
    for name in ("fp16", "qsgd"):
        with strategy.scope():
            model = dense(name, keras.optimizers.SGD(0.2), metrics=["accuracy"])
        accuracy = fit(model, epochs=4)["accuracy"][-1]
        assert accuracy > 0.75, (name, accuracy)
    with strategy.scope():
        model = embedded("int8", keras.optimizers.Adam(0.02), metrics=["accuracy"])
    history = fit(model, words, epochs=4)
    assert history["loss"][-1] < history["loss"][0] - 0.1, history


@behaviour
def an_exact_compressor_changes_nothing(strategy):
    sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
    for make, optimizer, kwargs in (
        (
            dense,
            lambda: adam(0.01, weight_decay=0.01, global_clipnorm=0.5),
            {"steps_per_execution": 3},
        ),
        (dense, lambda: sgd(0.1, gradient_accumulation_steps=2, use_ema=True), {}),
        (dense, lambda: keras.optimizers.LossScaleOptimizer(sgd(0.1), initial_scale=4.0), {}),
        (embedded, lambda: sgd(0.1, momentum=0.9), {}),
    ):
        weights = []
        for name in ("exact", "none"):
            with strategy.scope():
                model = make(name, optimizer(), **kwargs)
            fit(model, words if make is embedded else rows)
            weights.append(model.get_weights())
        assert_same(*weights)


@behaviour
def constraints_meet_exact_values(strategy):
    with strategy.scope():
        layers = [keras.Input((WIDTH,)), keras.layers.Dense(CLASSES, kernel_constraint="non_neg")]
        model = compiled(layers, "read_bf16", keras.optimizers.SGD(0.0))
    weights = [np.abs(w) for w in model.get_weights()]
    model.set_weights(weights)
    model.train_on_batch(*batch(0))
    assert_same(model.get_weights(), weights, 0.0)


@behaviour
def without_communication_nothing_moves(strategy):
    with strategy.scope():
        model = dense("alone", keras.optimizers.Adam(0.1))
    before = model.get_weights()
    fit(model)
    assert_same(model.get_weights(), before, 0.0)
    assert int(model.optimizer.iterations.numpy()) == 20
    gradients = [t for t in strategy.communication.traffic() if t.path.startswith("alone/")]
    sent = {t.compressed_bytes for t in gradients if t.direction == "gradient"}
    assert sent == {0}, sent
    assert sum(t.logical_bytes for t in gradients if t.direction == "gradient") > 0


@behaviour
def nan_reaches_the_weights_but_no_state(strategy):
    for name in ("topk", "powersgd"):
        with strategy.scope():
            model = dense(name)
        model.train_on_batch(*batch(0))
        before = strategy.state_dict(model.optimizer)
        assert any("hidden/kernel" in key for key in before), before
        model.train_on_batch(np.full((BATCH, WIDTH), np.nan, "float32"), labels[:BATCH])
        assert not np.isfinite(model.get_weights()[0]).all(), name
        for key, value in strategy.state_dict(model.optimizer).items():
            # What is behind the first kernel may be spared.
            assert np.isfinite(value).all(), key
            if "hidden/kernel" in key:
                np.testing.assert_array_equal(value, before[key], err_msg=key)


@behaviour
def skipped_steps_change_no_state(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        model = dense("int8", optimizer, steps_per_execution=2)
    x, y = rows[: 4 * BATCH].copy(), labels[: 4 * BATCH]
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    before = strategy.state_dict(optimizer)
    assert before
    weights = model.get_weights()
    x[:] = np.inf
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(model.get_weights(), weights, 0.0)
    for key, value in strategy.state_dict(optimizer).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


def counted(strategy, name, direction):
    found = {}
    for t in strategy.communication.traffic():
        if t.path.startswith(f"{name}/") and t.direction == direction:
            assert t.wire_bytes == t.compressed_bytes
            path = t.path.removeprefix(f"{name}/").split("/", 1)[1]
            sums = found.get(path, (0, 0))
            found[path] = sums[0] + t.logical_bytes, sums[1] + t.compressed_bytes
    return found


@behaviour
def bytes_are_counted(strategy):
    kwargs = {"steps_per_execution": 4}
    with strategy.scope():
        model = dense("counted_exact", keras.optimizers.SGD(0.1), **kwargs)
    fit(model, epochs=1)
    kernels = {"kernel": 4 * (WIDTH * 16 + 16 * CLASSES), "bias": 4 * (16 + CLASSES)}
    steps = 10
    expected = {path: (steps * size, steps * size) for path, size in kernels.items()}
    assert counted(strategy, "counted_exact", "gradient") == expected
    assert counted(strategy, "counted_exact", "pull") == expected
    before = strategy.communication.seconds
    model.evaluate(rows, labels, batch_size=BATCH, verbose=0)
    model.predict(rows, batch_size=BATCH, verbose=0)
    # Without updates in between, the steps that a worker takes in one go read once.
    expected = {path: ((10 + 3 + 3) * size,) * 2 for path, size in kernels.items()}
    assert counted(strategy, "counted_exact", "pull") == expected
    assert 0 < before < strategy.communication.seconds < 60


@behaviour
def compressed_bytes_are_counted(strategy):
    parts = 2 if strategy.extended._variable_partitioner else 1
    with strategy.scope():
        model = dense("sign", keras.optimizers.SGD(0.1))
    before = counted(strategy, "sign", "gradient").get("kernel", (0, 0))
    fit(model, epochs=1)
    logical, sent = np.subtract(counted(strategy, "sign", "gradient")["kernel"], before)
    shapes = [(WIDTH // parts, 16), (16 // parts, CLASSES)]
    assert logical == 10 * 4 * parts * sum(a * b for a, b in shapes)
    each = [LOSSY["sign"].wire_bytes(shape, "float32") for shape in shapes]
    assert sent == 10 * parts * sum(each), (sent, each)


@behaviour
def bytes_that_differ_from_step_to_step_are_counted(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=5, name="accumulating")
        model = embedded("bf16", optimizer)
    before = {d: counted(strategy, "bf16", d) for d in ("gradient", "pull")}
    fit(model, words, epochs=1)
    # One step of five sends; lookups bring each row once, with its number asked for.
    distinct = sum(len(np.unique(words[i * BATCH : (i + 1) * BATCH])) for i in range(10))
    _, pulled = counted(strategy, "bf16", "pull")["embeddings"]
    assert pulled == distinct * (16 * 4 + 4), (pulled, distinct)
    now = counted(strategy, "bf16", "gradient")
    logical, sent = np.subtract(now["kernel"], before["gradient"].get("kernel", (0, 0)))
    assert (logical, sent) == (2 * 4 * 16 * CLASSES, 2 * 2 * 16 * CLASSES), (logical, sent)
    # The others wait on the worker, and so do the rows: each is sent once.
    distinct = sum(len(np.unique(words[i * BATCH * 5 : (i + 1) * BATCH * 5])) for i in range(2))
    logical, sent = np.subtract(now["embeddings"], before["gradient"].get("embeddings", (0, 0)))
    expected = distinct * (16 * 4 + 4), distinct * (16 * 2 + 4)
    assert (logical, sent) == expected, (logical, sent, expected)
    # Adagrad squares the rows of a repeated id one by one, as in one process; SGD adds them up.
    by_batch = [len(np.unique(words[i * BATCH : (i + 1) * BATCH])) for i in range(10)]
    before, repeated = (0, 0), 10 * BATCH * 6
    for optimizer, rows_sent in (("adagrad", repeated), ("sgd", sum(by_batch))):
        with strategy.scope():
            model = embedded("fp16", optimizer)
        fit(model, words, epochs=1)
        now = counted(strategy, "fp16", "gradient")["embeddings"]
        expected = rows_sent * (16 * 4 + 4), rows_sent * (16 * 2 + 4)
        assert tuple(np.subtract(now, before)) == expected, (optimizer, now, before, expected)
        before = now


@behaviour
def state_is_saved_and_restored(strategy):
    folder = pathlib.Path(sys.argv[1])
    with strategy.scope():
        model = dense("powersgd", keras.optimizers.SGD(0.1, name="saved"))
    for i in range(3):
        model.train_on_batch(*batch(i))
    state = strategy.state_dict(model.optimizer)
    assert state and all(name.startswith("worker-0-of-1/") for name in state), list(state)
    np.savez(folder / "state.npz", **state)
    saved, iterations = model.get_weights(), model.optimizer.iterations.numpy()
    np.savez(folder / "saved.npz", *saved)
    for i in range(3, 6):
        model.train_on_batch(*batch(i))
    after = model.get_weights()
    np.savez(folder / "after.npz", *after)
    model.set_weights(saved)
    model.optimizer.iterations.assign(iterations)
    strategy.load_state_dict(model.optimizer, state)
    for i in range(3, 6):
        model.train_on_batch(*batch(i))
    assert_same(model.get_weights(), after, 0.0)
    # A state that lacks something leaves what there is.
    before, lacking = strategy.state_dict(model.optimizer), dict(list(state.items())[1:])
    try:
        strategy.load_state_dict(model.optimizer, lacking)
    except ValueError as error:
        assert "it has nothing for " in str(error), error
    else:
        raise AssertionError("a state without one of its names was loaded")
    for name, value in strategy.state_dict(model.optimizer).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@behaviour
def backup_and_restore_keeps_states(strategy):
    class Interrupted(Exception):
        pass

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise Interrupted

    def train(name, *callbacks):
        # Its optimizer has a name that no other one has while both live.
        gc.collect()
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = dense(name, keras.optimizers.SGD(0.1, name="backed_up"))
        fit(model, epochs=4, callbacks=list(callbacks))
        return model.get_weights()

    folder = pathlib.Path(sys.argv[1], "backup")
    try:
        train("powersgd", keras.callbacks.BackupAndRestore(folder), Interrupt())
    except Interrupted:
        pass
    assert list((folder / "compression").iterdir())
    resumed = train("powersgd", keras.callbacks.BackupAndRestore(folder))
    assert not folder.exists()
    assert_same(resumed, train("powersgd"), 0.0)


def resume(strategy):
    """What `state_is_saved_and_restored` goes on with in a new process, exactly."""
    folder = pathlib.Path(sys.argv[1])
    with strategy.scope():
        model = dense("powersgd", keras.optimizers.SGD(0.1, name="another_process"))
    with np.load(folder / "state.npz") as state:
        strategy.load_state_dict(model.optimizer, state)
    with np.load(folder / "saved.npz") as arrays:
        model.set_weights(list(arrays.values()))
    model.optimizer.iterations.assign(3)
    for i in range(3, 6):
        model.train_on_batch(*batch(i))
    with np.load(folder / "after.npz") as arrays:
        assert_same(model.get_weights(), list(arrays.values()), 0.0)


def main():
    shards, only = int(sys.argv[2]), sys.argv[3:]
    cluster = InProcessCluster(workers=1, ps=2)
    cluster.start()
    strategy = strategy_for(cluster, shards)
    if only == ["resume"]:
        resume(strategy)
        return
    failures = {}
    for name, function in BEHAVIOURS.items():
        if only and name not in only:
            continue
        keras.backend.clear_session()
        print(name, flush=True)
        try:
            function(strategy)
            failures[name] = None
        except Exception:
            failures[name] = traceback.format_exc()
            traceback.print_exc()
    pathlib.Path(sys.argv[1], "failures.json").write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
