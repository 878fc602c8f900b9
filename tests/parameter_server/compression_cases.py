"""Cases of compressed gradients and reads, which are those of steps taken by hand.

A model's name says what it is compressed by. Each case raises if it is not as it should be, and may
be given the number of shards of each variable.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus import compression
from tests.parameter_server.options import options

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
    "sign": compression.Sign(32),
    "topk": compression.TopK(0.2),
    "topk_corrected": compression.TopK(0.2, momentum_correction=0.5),
    "powersgd": compression.PowerSGD(1, min_compression_rate=1),
    "own": Levels(),
}
READ = {"read_bf16": compression.Cast("bfloat16"), "read_int8": compression.Int8(8)}
READ["read_own"] = Levels()


def by_name():
    """The compressors of gradients and of reads, of which a model's name chooses one."""
    push = {f"{name}/*": compressor for name, compressor in LOSSY.items()}
    pull = {f"{name}/*": compressor for name, compressor in READ.items()}
    return {
        "compression": compression.ByVariable(push, min_size=1, min_rank=0),
        "pull_compression": compression.ByVariable(pull, min_size=1, min_rank=2),
    }


def compressed(case):
    """A case whose models are compressed by their names."""

    @functools.wraps(case)
    def of_strategy(strategy, shards=None, **args):
        with options(strategy, partitioner=shards, **by_name()):
            case(strategy, **args)

    return of_strategy


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

    def train(self, x, y, workers=1):
        """Takes a step with the mean of what workers send of their parts of the batch."""
        variables = self._model.trainable_variables
        exact = [v.numpy() for v in variables]
        if self._pull is not None:
            for i, v in enumerate(variables):
                if len(v.shape) > 1:
                    v.assign(self._cut_up(i, v.value, lambda part, _: self._round(part)))
        sent = []
        for worker, part in enumerate(np.split(np.arange(len(x)), workers)):
            with tf.GradientTape() as tape:
                loss = self._model.loss(y[part], self._model(x[part], training=True))
            gradients = tape.gradient(loss, [v.value for v in variables])
            if self._push is not None:
                send = functools.partial(self._sent, worker)
                gradients = [self._cut_up(i, g, send) for i, g in enumerate(gradients)]
            sent.append(gradients)
        for v, value in zip(variables, exact):
            v.assign(value)
        if workers > 1:
            gradients = [sum(each) / workers for each in zip(*sent)]
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

    def _sent(self, worker, gradient, place):
        shape, dtype, key = gradient.shape, gradient.dtype, (worker, *place)
        chosen = self._push.for_variable("", shape, dtype)
        if chosen is None:
            return gradient
        state = self._states.get(key, chosen.init(shape, dtype))
        payload, self._states[key] = chosen.encode(gradient, state, self._number)
        return chosen.decode(payload, shape, dtype, self._number)

    def _round(self, value):
        payload, _ = self._pull.encode(value, (), 0)
        return self._pull.decode(payload, value.shape, value.dtype, 0)


def compare_with_hand(strategy, name, make, data=None, steps=3, pull=None, workers=1):
    with strategy.scope():
        model = make(name)
    with psp.single_process():
        by_hand = ByHand(make("by_hand"), model, LOSSY.get(name), pull)
    for i in range(steps):
        model.train_on_batch(*batch(i, data))
        assert_same(model.get_weights(), by_hand.train(*batch(i, data), workers), 2e-6)
    return model


@compressed
def as_by_hand(strategy, name, workers=1):
    compare_with_hand(strategy, name, dense, steps=5, workers=workers)


@compressed
def several_steps_of_one_call_as_by_hand(strategy):
    with strategy.scope():
        model = dense("sign", steps_per_execution=5)
    with psp.single_process():
        by_hand = ByHand(dense("by_hand"), model, LOSSY["sign"])
    fit(model, epochs=1)
    for i in range(10):
        weights = by_hand.train(*batch(i))
    assert_same(model.get_weights(), weights, 5e-6)


@compressed
def rows_of_embeddings_as_by_hand(strategy):
    for name in ("int8", "sign"):
        compare_with_hand(strategy, name, embedded, words)


@compressed
def rounded_reads_as_by_hand(strategy):
    for name in ("read_bf16", "read_int8", "read_own"):
        model = compare_with_hand(strategy, name, dense, pull=READ[name])
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


@compressed
def rounded_lookups_as_by_hand(strategy):
    compare_with_hand(strategy, "read_bf16", embedded, words, pull=READ["read_bf16"])


@compressed
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


@compressed
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


@compressed
def gradients_go_without_their_loss_scale(strategy):
    # By which they are too large for float16; the second scale grows.
    scale, sgd = 2.0**24, keras.optimizers.SGD
    wrapped = functools.partial(keras.optimizers.LossScaleOptimizer, dynamic_growth_steps=3)
    for name in "fp16", "int8":
        found = []
        for own, is_wrapped in (None, False), (scale, False), (None, True):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                optimizer = sgd(0.1, loss_scale_factor=own)
                model = dense(name, wrapped(optimizer, scale) if is_wrapped else optimizer)
            fit(model, epochs=1)
            found.append(model.get_weights())
        for weights in found[1:]:
            assert_same(weights, found[0], 0.0)


def counted(strategy, name, direction):
    found = {}
    for t in strategy.communication.traffic():
        if t.path.startswith(f"{name}/") and t.direction == direction:
            assert t.wire_bytes == t.compressed_bytes
            path = t.path.removeprefix(f"{name}/").split("/", 1)[1]
            sums = found.get(path, (0, 0))
            found[path] = sums[0] + t.logical_bytes, sums[1] + t.compressed_bytes
    return found


@compressed
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


@compressed
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


@compressed
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


@compressed
def state_is_saved_and_restored(strategy):
    def made(name):
        with strategy.scope():
            return dense("powersgd", keras.optimizers.SGD(0.1, name=name))

    def train(model, batches):
        for i in batches:
            model.train_on_batch(*batch(i))
        return model.get_weights()

    model = made("saved")
    saved = train(model, range(3))
    state = strategy.state_dict(model.optimizer)
    assert state and all(name.startswith("worker-0-of-1/") for name in state), list(state)
    after = train(model, range(3, 6))
    # Another process may call the optimizer differently.
    for other in model, made("another"):
        model = other
        model.set_weights(saved)
        model.optimizer.iterations.assign(3)
        strategy.load_state_dict(model.optimizer, state)
        assert_same(train(model, range(3, 6)), after, 0.0)
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
