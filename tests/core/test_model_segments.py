"""A functional model's graph in segments: as few as the order of its layers allows."""

import keras
import numpy as np

from keras_psplus.core.graph import subgraph

layers = keras.layers


def names(segments):
    return [(one.kind, [operation.name for operation in one.operations]) for one in segments]


def test_what_is_around_an_operation_is_one_segment_before_and_one_behind():
    inputs = keras.Input((4,))
    first, bad = layers.Dense(4, name="first"), layers.Dense(4, name="bad")
    twice, last = layers.Dense(4, name="twice"), layers.Dense(2, name="last")
    h = first(inputs)
    other = twice(h)
    outputs = last(layers.Add(name="add")([bad(h), twice(other), inputs]))
    model = keras.Model(inputs, [outputs, h])

    def kind(operation):
        if operation.name == "add":
            return subgraph.INHERITED
        return "as it is" if operation is bad else "compiled"

    segments = subgraph.split(model, kind)
    assert names(segments) == [
        ("compiled", ["first", "twice", "twice"]),
        ("as it is", ["bad", "add"]),
        ("compiled", ["last"]),
    ]
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    found = {id(inputs): x}
    for one in segments:
        one.run(found, one.function)
    for expected, output in zip(model(x), model.outputs):
        np.testing.assert_allclose(found[id(output)], expected, rtol=1e-5, atol=1e-6)


def test_a_graph_of_one_kind_is_one_segment():
    model = keras.Sequential([keras.Input((3,)), *[layers.Dense(3) for _ in range(3)]])
    (one,) = subgraph.split(model._functional, lambda operation: 0)
    assert len(one.operations) == 3
