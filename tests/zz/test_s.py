import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parameter_server.options import options
from tests.support.cluster import run


def lacking(strategy, overlap):
    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.kernels = [
                self.add_weight(shape=(512, 512), initializer="zeros", name=f"k{i}")
                for i in range(6)
            ]
            self.means = [keras.metrics.Mean(name=f"m{i}") for i in range(6)]

        @property
        def metrics(self):
            return self.means

        def call(self, x):
            return x

        def train_step(self, data):
            read = [tf.reduce_mean(k.value) for k in self.kernels]
            r = tf.add_n(read) * 0
            z = tf.ones([700, 700]) * (1 + r)
            for _ in range(3):
                z = z @ z / 700.0
            self.optimizer.apply(
                [tf.ones([512, 512]) * tf.reduce_mean(z) for _ in self.kernels], self.kernels
            )
            after = [tf.reduce_mean(k.value) for k in self.kernels]
            for m, a, b in zip(self.means, read, after):
                m.update_state(b - a - 1)
            return {m.name: m.result() for m in self.means}

    with options(strategy, overlap=overlap):
        with strategy.scope():
            model = Counting()
            model.compile(keras.optimizers.SGD(-1.0))
        x = np.zeros([400, 3], "float32")
        h = model.fit(x, batch_size=4, epochs=3, verbose=0).history
    import time

    t = time.time()
    return {"h": np.array([h[f"m{i}"] for i in range(6)]).round(2)}


@pytest.mark.parametrize("overlap", [False, True])
def test_lacking(overlap):
    out = run("async22", lacking, overlap=overlap)
    print(overlap, out.first["h"])
