"""Recipes of programs: models and scripts that are no single name of Keras."""

import keras
import numpy as np
import tensorflow as tf

from tests.matrix.training import ROWS, bundle, compiled, fitted, integers, numbers, script, trained
from tests.multi_process import fit_cases

L = keras.layers
# By column, the cases that may go wrong there; all-reduce has all others.
_SOMEWHERE = {
    "two devices": """
        convolutions_of_single_rows run_eagerly gradient_accumulation_in_loop evaluate_and_predict
    """,
    "pipeline": """
        last_batch_of_one_row dataset_of_unknown_length grain_dataset much_at_once
        moving_average_after_skipped_steps on_batch
    """,
    "async servers": """
        steps_per_execution py_dataset generator metrics random_predictions batches_of_known_size
        several_inputs_and_outputs
    """,
    "sync servers": """
        perplexity_of_keras_hub mixed_precision_skips_overflow own_loss_with_an_empty_replica
        ragged_and_sparse_rows
    """,
    "sync servers, cut": """
        positions_of_tokens adamw_with_schedule_and_average masked_sequence_loss
        mean_with_sample_weight
    """,
    "async servers, cut": """
        callbacks_between_the_steps global_clipnorm several_steps_in_a_loop
        embeddings_of_several_widths outputs_of_predict
        metrics_that_replace_or_have_several_results
    """,
}
# Logs of a batch are those of the last step that has come back, or of none.
_ONLY_ASYNCHRONOUS = {
    *("metrics_that_replace_or_have_several_results", "callbacks_between_the_steps"),
    *("random_predictions", "batches_of_known_size", "outputs_of_predict", "much_at_once"),
}
# Plain Keras counts one more step to find their end: docs/differences.md.
_UNKNOWN_LENGTHS = {"grain_dataset", "dataset_of_unknown_length", "generator", "maps_of_own_rows"}


def _columns(name):
    found = tuple(column for column, cases in _SOMEWHERE.items() if name in cases.split())
    return found if name in _ONLY_ASYNCHRONOUS else (*found, "all-reduce")


for _name, _case in fit_cases.CASES.items():
    bundle(
        "programs",
        f"programs: {_name.replace('_', ' ')}",
        (_name.replace("_", " "),),
        lambda names, case=_case: case(),
        tolerance=fit_cases.TOLERANCE[_name],
        columns=_columns(_name),
        counts=_name not in _UNKNOWN_LENGTHS,
    )


def _rows(rows=ROWS):
    return numbers(rows, 12), numbers(rows, 2, seed=1)


def _mlp(optimizer=None, **options):
    layers = [L.Dense(8, "tanh", name="first"), L.Dense(2, name="last")]
    model = keras.Sequential([keras.Input((12,)), *layers], name="mlp")
    return compiled(model, optimizer or keras.optimizers.Adam(0.01), "mse", **options)


@script("programs")
def fit_twice():
    model, first = fitted(_mlp(), *_rows())
    model, second = fitted(model, *_rows(17))
    return model, first | {f"{name}/2": value for name, value in second.items()}


@script("programs")
def unfrozen_and_compiled_again():
    model = keras.Sequential([keras.Input((12,)), L.Dense(8, "tanh"), L.Dense(2)])
    model.layers[0].trainable = False
    compiled(model, keras.optimizers.Adam(0.01), "mse")
    model, first = fitted(model, *_rows())
    model.layers[0].trainable = True
    compiled(model, keras.optimizers.Adam(0.001), "mse")
    model, second = fitted(model, *_rows())
    return model, first | {f"{name}/2": value for name, value in second.items()}


@script("programs")
def batches_one_by_one():
    model, (x, y) = _mlp(metrics=["mae"]), _rows()
    logs = [model.train_on_batch(x[i : i + 8], y[i : i + 8]) for i in range(0, ROWS, 8)]
    tested = model.test_on_batch(x, y)
    return model, {
        "logs": np.asarray(logs),
        "tested": np.asarray(tested),
        "predicted": model.predict_on_batch(x[:8]),
    }


@script("programs")
def learning_rate_changed_between():
    model, first = fitted(_mlp(), *_rows())
    model.optimizer.learning_rate = 0.001
    model, second = fitted(model, *_rows())
    return model, first | {f"{name}/2": value for name, value in second.items()}


@script("programs")
def weights_set_between():
    model, first = fitted(_mlp(), *_rows())
    model.set_weights([0.5 * w for w in model.get_weights()])
    model, second = fitted(model, *_rows())
    return model, first | {f"{name}/2": value for name, value in second.items()}


@keras.saving.register_keras_serializable("matrix")
class Penalized(L.Layer):
    """A layer that adds a loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(6)

    def call(self, x, training=False):
        y = self.dense(x)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(y)))
        return y


@keras.saving.register_keras_serializable("matrix")
class PenalizedInTraining(Penalized):
    def call(self, x, training=False):
        y = self.dense(x)
        if training:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(y)))
        return y


def _of(layer, loss="mse"):
    x = keras.Input((12,))
    model = keras.Model(x, L.Dense(2, name="head")(layer(L.Dense(12, name="before")(x))))
    compiled(model, keras.optimizers.SGD(0.05), loss)
    return trained(model, *_rows())


@script("programs")
def add_loss():
    return _of(Penalized())


@script("programs")
def add_loss_in_training():
    return _of(PenalizedInTraining())


@keras.saving.register_keras_serializable("matrix")
class Flow(L.Layer):
    """Two dense layers behind control flow."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.one, self.other = L.Dense(12), L.Dense(12)

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        return getattr(self, self.kind)(x)

    def tf_cond(self, x):
        return tf.cond(tf.shape(x)[1] > 3, lambda: self.one(x), lambda: self.other(x))

    def ops_cond(self, x):
        return keras.ops.cond(keras.ops.mean(x) < 1e6, lambda: self.one(x), lambda: self.other(x))

    def tf_while(self, x):
        def body(i, y):
            return i + 1, keras.ops.tanh(self.one(y))

        return tf.while_loop(lambda i, y: i < 3, body, (0, x), maximum_iterations=3)[1]

    def ops_while(self, x):
        def body(i, y):
            return i + 1, keras.ops.tanh(self.one(y))

        return keras.ops.while_loop(lambda i, y: i < 3, body, (0, x), maximum_iterations=3)[1]

    def ops_scan(self, x):
        def step(carry, part):
            carry = carry + part
            return carry, carry

        steps = keras.ops.stack([self.one(x), self.other(x), x])
        return keras.ops.scan(step, keras.ops.zeros_like(x), steps)[1][2]

    def ops_fori(self, x):
        return keras.ops.fori_loop(0, 3, lambda i, y: keras.ops.tanh(self.one(y)), x)

    def ops_switch(self, x):
        return keras.ops.switch(keras.ops.ndim(x) - 1, [self.one, self.other], x)

    def tf_map(self, x):
        return tf.map_fn(lambda row: self.one(row[None])[0], x)

    def ops_map(self, x):
        return keras.ops.map(lambda row: self.one(row[None])[0], x)

    def vectorized_map(self, x):
        return keras.ops.vectorized_map(lambda row: self.one(row[None])[0], x)

    def stop_gradient(self, x):
        return self.one(x) + keras.ops.stop_gradient(self.other(x))

    def custom_gradient(self, x):
        @tf.custom_gradient
        def doubled(y):
            return y, lambda upstream: 2.0 * upstream

        return doubled(self.one(x))

    def tf_function(self, x):
        return tf.function(lambda y: self.one(y) * 2.0)(x)

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


for _kind in (
    *("tf_cond", "ops_cond", "tf_while", "ops_while", "ops_scan", "ops_fori", "ops_switch"),
    *("tf_map", "ops_map", "vectorized_map", "stop_gradient", "custom_gradient", "tf_function"),
):
    bundle(
        "programs",
        f"programs: {_kind} in a layer",
        (f"{_kind} in a layer",),
        lambda names, kind=_kind: _of(Flow(kind)),
    )


@script("programs")
def lora():
    layers = [L.Dense(8, "tanh", name="first"), L.EinsumDense("ab,bc->ac", 2, name="last")]
    model = keras.Sequential([keras.Input((12,)), *layers])
    for layer in layers:
        layer.enable_lora(2)
    compiled(model, keras.optimizers.Adam(0.05), "mse")
    return trained(model, *_rows())


@script("programs")
def int8_below_trained_layers():
    frozen = keras.Sequential([keras.Input((12,)), L.Dense(8, "tanh")])
    frozen.quantize("int8")
    frozen.trainable = False
    model = keras.Sequential([keras.Input((12,)), frozen, L.Dense(2)])
    compiled(model, keras.optimizers.SGD(0.05), "mse")
    return trained(model, *_rows())


@script("programs")
def remat():
    class Recomputed(L.Layer):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(12, "tanh")
            self.recomputed = keras.remat(self.dense)

        def call(self, x):
            return self.recomputed(x)

    return _of(Recomputed())


# Products of 16 bits, whose sums are taken in another order.
@script("programs", tolerance=1e-4)
def mixed_bfloat16_kept_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((12,)), L.Dense(8), L.Dense(2, dtype="float32")])
    compiled(model, keras.optimizers.SGD(0.01), "mse")
    model, found = fitted(model, *_rows())
    keras.config.set_dtype_policy("float32")
    return model, found


@keras.saving.register_keras_serializable("matrix")
class Stepping(keras.Model):
    """A subclassed model with a step of its own, which is named by what it does."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = L.Dense(8, "tanh"), L.Dense(2)
        self.noted = keras.metrics.Mean(name="noted")

    def call(self, x):
        return self.last(self.first(x))

    def get_config(self):
        return {"kind": self.kind}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            if self.kind == "gradient by inputs":
                tape.watch(x)
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
            if self.kind == "gradient by inputs":
                with tape.stop_recording():
                    slope = tape.gradient(y_pred, x)
                loss += 0.0 * tf.reduce_mean(slope)
                self.noted.update_state(tf.reduce_mean(slope, axis=1))
        if self.kind == "jacobian by inputs":
            with tf.GradientTape() as inner:
                inner.watch(x)
                again = self(x, training=True)
            jacobian = inner.batch_jacobian(again, x)
            self.noted.update_state(tf.reduce_mean(jacobian, axis=[1, 2]))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        if self.kind == "clipped gradients":
            gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
            self.noted.update_state(norm)
        if self.kind == "numpy in the step":
            shown = tf.numpy_function(lambda v: np.float32(2.0), [loss], tf.float32)
            shown.set_shape([])
            self.noted.update_state(shown)
        self.optimizer.apply(gradients, weights)
        return {**self.compute_metrics(x, y, y_pred), "noted": self.noted.result()}


for _kind in (
    *("plain step", "gradient by inputs", "jacobian by inputs", "clipped gradients"),
    "numpy in the step",
):

    def _stepped(names):
        model = Stepping(names[0])
        compiled(model, keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return fitted(model, *_rows())

    bundle("programs", f"programs: {_kind}", (_kind,), _stepped)


# In a scope, TensorFlow has no gradients by mirrored variables.
@script("programs", makes_scope=True)
def eager_gradients_after_fit(scope):
    with scope():
        model = _mlp()
    model, found = fitted(model, *_rows())
    x, y = (tf.constant(one) for one in _rows())
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    for place, gradient in enumerate(gradients):
        found[f"gradient/{place}"] = np.asarray(gradient)
    return model, found


def _steps_of_script(scope, wrap):
    """Steps that a script takes itself, of the mean of what the workers compute that run it."""
    with scope():
        model, strategy = (
            _mlp(keras.optimizers.SGD(0.05, momentum=0.9)),
            tf.distribute.get_strategy(),
        )
    task = getattr(strategy, "task", None)
    is_of_all = task is not None and task.name.startswith("worker")
    workers = strategy.num_replicas_in_sync if is_of_all else 1
    model, found = fitted(model, *_rows())
    x, y = (tf.constant(one) for one in _rows())

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            share = loss / workers
        gradients = tape.gradient(share, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    step = wrap(step)
    found["losses"] = np.asarray([step(), step()])
    return model, found | fitted(model, *_rows(17))[1]


@script("programs", makes_scope=True)
def eager_steps_after_fit(scope):
    return _steps_of_script(scope, lambda step: step)


@script("programs", makes_scope=True)
def steps_of_own_function_after_fit(scope):
    """Of which the second call takes another two steps."""
    return _steps_of_script(scope, lambda step: tf.function(lambda: [step(), step()]))


@script("programs", makes_scope=True)
def function_on_the_model_after_fit(scope):
    with scope():
        model = _mlp()
    model, found = fitted(model, *_rows())
    called = tf.function(lambda x: model(x, training=False))
    found["called"] = np.asarray(called(tf.constant(_rows()[0])))
    return model, found


@script("programs")
def callback_that_changes_training():
    class Unfreezing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.optimizer.learning_rate = 0.001
                last = self.model.get_layer("last")
                last.kernel.assign(0.5 * last.kernel)

    return fitted(_mlp(), *_rows(), callbacks=[Unfreezing()], epochs=3)


@script("programs")
def tied_weights():
    tokens = keras.Input((5,), dtype="int32")
    table = L.Embedding(12, 6, name="table")
    h = L.Dense(6, "tanh")(table(tokens))
    logits = Tied(table, name="tied")(h)
    model = keras.Model(tokens, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled(model, keras.optimizers.SGD(0.05), loss)
    return fitted(model, integers(ROWS, 5, below=12), integers(ROWS, 5, below=12, seed=1))


class Tied(L.Layer):
    """Logits by a table's rows."""

    def __init__(self, table, **kwargs):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


@script("programs")
def copy_of_a_model():
    model, first = fitted(_mlp(), *_rows())
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    compiled(copy, keras.optimizers.SGD(0.05), "mse")
    copy, second = fitted(copy, *_rows())
    return copy, first | {f"{name}/2": value for name, value in second.items()}


@script("programs", saves=False)
def table_for_any_id():
    """Plain Keras has one of a fixed size, of which training touches all rows."""
    ids, rows = _table(keras.initializers.Constant(0.05))
    model = keras.Model(ids, L.Dense(2, name="head")(rows))
    # Others square repeated ids one by one in plain Keras.
    compiled(model, keras.optimizers.SGD(0.3), "mse")
    return trained(model, integers(ROWS, 5, below=12), numbers(ROWS, 2, seed=1))


@script("programs", saves=False)
def table_for_any_id_in_16_bits():
    """Rows are few multiples of 1/32, which bfloat16 has: nothing is rounded."""
    ids, rows = _table("zeros", rows_dtype="bfloat16", slots_dtype="bfloat16")
    model = keras.Model(ids, rows)
    compiled(
        model, keras.optimizers.SGD(0.25), lambda y, rows: keras.ops.sum((1 - 2 * y) * rows, -1)
    )
    return trained(model, integers(ROWS, 5, below=12), integers(ROWS, 20, below=2, seed=1))


def _table(start, **options):
    """Five ids, and their rows side by side."""
    ids, start = keras.Input((5,), dtype="int32"), keras.initializers.get(start)
    if tf.distribute.has_strategy():
        import keras_psplus as psp

        table = psp.layers.DynamicEmbedding(4, initializer=start, name="table", **options)
    else:
        table = L.Embedding(12, 4, start, name="table")
    return ids, L.Flatten()(table(ids))
