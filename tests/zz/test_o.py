import keras
import numpy as np
import pytest

from tests.support.cluster import equals_one_process


def program(strategy, optimizer, steps_per_execution=1):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 150)).astype("float32")
    ids = rng.integers(0, 3000, size=(96, 4))
    y = (x[:, :1] > 0).astype("float32")
    keras.utils.set_random_seed(3)
    import contextlib

    with strategy.scope() if strategy else contextlib.nullcontext():
        a, b = keras.Input((150,)), keras.Input((4,), dtype="int64")
        e = keras.layers.Flatten()(keras.layers.Embedding(3000, 16)(b))
        h = keras.layers.Dense(200, "tanh")(a)
        h = keras.layers.BatchNormalization()(h)
        h = keras.layers.Dropout(0.2, seed=4)(h)
        h = keras.layers.Concatenate()([h, e])
        h = keras.layers.Dense(100, "relu", kernel_regularizer="l2")(h)
        model = keras.Model([a, b], keras.layers.Dense(1)(h))
        kinds = {
            "sgd": lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7), momentum=0.9
            ),
            "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
            "ema": lambda: keras.optimizers.Lion(
                0.001, use_ema=True, ema_momentum=0.9, weight_decay=0.01
            ),
        }
        model.compile(
            kinds[optimizer](), "mse", metrics=["mae"], steps_per_execution=steps_per_execution
        )
    seen = []

    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append({k: float(v) for k, v in logs.items()})

    h = model.fit(
        [x, ids],
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        shuffle=False,
        callbacks=[Logs()],
        validation_data=([x[:20], ids[:20]], y[:20]),
    )
    return {f"w{i}": np.asarray(w) for i, w in enumerate(model.get_weights())} | {
        "logs": np.array([list(s.values()) for s in seen])
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "ema"])
@pytest.mark.parametrize("layout_", ["async_threads", "async_sharded"])
def test_exact(layout_, optimizer):
    equals_one_process(layout_, program, optimizer=optimizer)
