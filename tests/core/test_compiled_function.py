"""Compiled calls leave behind what the calls themselves leave."""

import keras
import tensorflow as tf

from keras_psplus.core.graph.compiled_calls import CompiledFunction
from keras_psplus.keras_internals.keras_parts import global_state

layers = keras.layers


class Frozen(layers.Layer):
    """Calls a layer that does not train, and returns more than tensors."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, x):
        return {"h": self.norm(x, training=False), "name": "frozen", "count": 3, "none": None}


def test_outputs_that_are_no_tensors_come_back_as_they_are():
    layer = Frozen()

    @tf.function(autograph=False)
    def step(x):
        compiled = CompiledFunction(layer, layer._flatten_layers, (x,), {})
        assert compiled.why_not() is None
        for _ in range(2):
            outputs = compiled(x)
            assert [outputs[key] for key in ("name", "count", "none")] == ["frozen", 3, None]
        return outputs["h"]

    x = tf.random.stateless_uniform([3, 2], [1, 2])
    layer(x)
    tf.debugging.assert_near(step(x), layer(x)["h"])


def test_what_a_call_leaves_in_the_context_of_others():
    found = []

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.frozen = Frozen()

        def call(self, x, training=None):
            context = global_state.get_global_attribute("current_call_ctx")
            compiled = CompiledFunction(self.frozen, self.frozen._flatten_layers, (x,), {})
            found.append(context.training)
            for one in (self.frozen, compiled, compiled):
                context.training = True
                outputs = one(x)
                found.append(context.training)
            return outputs["h"]

    outer = Outer()
    outer.frozen(tf.ones([2, 2]))
    tf.function(lambda x: outer(x, training=True), autograph=False)(tf.ones([2, 2]))
    assert found[0] is True
    assert len(set(found[1:])) == 1
