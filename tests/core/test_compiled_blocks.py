"""Parts of a model: about as many bytes of weights in each, along the graph."""

import keras

import keras_psplus as psp
from keras_psplus.core.graph.model_segments import nodes_in_order
from keras_psplus.core.models.compiled_blocks import CompiledBlocks
from tests.all_reduce.jit_blocks_cases import Encoder

layers = keras.layers


def parts(model, number, function=None, is_remote=lambda layer: False):
    function = function or model
    found = CompiledBlocks(model, number, is_remote).parts_of(function)
    nodes = nodes_in_order(function)
    numbers = [found[id(node)] for node in nodes] if found else []
    assert numbers == sorted(numbers)
    by_part = {}
    for number, node in zip(numbers, nodes):
        by_part.setdefault(number, []).append(node.operation.name)
    return list(by_part.values())


def perceptron(*widths):
    inputs = h = keras.Input((widths[0],))
    for i, width in enumerate(widths[1:]):
        h = layers.Activation("relu", name=f"relu{i}")(layers.Dense(width, name=f"{i}")(h))
    return keras.Model(inputs, h)


def test_the_largest_part_is_as_small_as_can_be():
    # 160, 72, 72 and 9 numbers.
    model = perceptron(19, 8, 8, 8, 1)
    assert parts(model, 2) == [["0", "relu0"], ["1", "relu1", "2", "relu2", "3", "relu3"]]
    assert parts(model, 9) == [[f"{i}", f"relu{i}"] for i in range(4)]


def test_weights_that_do_not_train_or_are_on_servers_do_not_count():
    model = perceptron(19, 8, 8, 8, 1)
    model.layers[1].trainable = False
    assert parts(model, 2) == [["0", "relu0", "1", "relu1"], ["2", "relu2", "3", "relu3"]]
    found = parts(model, 2, is_remote=lambda layer: layer.name == "1")
    assert found == [["0", "relu0", "1", "relu1", "2", "relu2"], ["3", "relu3"]]


def test_a_layer_that_is_called_twice_belongs_to_its_first_call():
    inputs = keras.Input((8,))
    shared = layers.Dense(8, name="shared")
    model = keras.Model(inputs, shared(layers.Dense(8, name="own")(shared(inputs))))
    assert parts(model, 2) == [["shared"], ["own", "shared"]]


def test_models_inside_get_their_share():
    inner, head = perceptron(19, 8, 8, 8, 1), layers.Dense(3, name="head")
    inputs = keras.Input((19,))
    model = keras.Model(inputs, head(inner(inputs)))
    blocks = CompiledBlocks(model, 3, lambda layer: False)
    assert blocks.is_cut(model) and blocks.is_cut(inner) and not blocks.is_cut(head)
    assert len(parts(model, 3, inner)) == 3
    assert parts(model, 3) == []
    psp.unit(inner)
    assert blocks.is_cut(model) and not blocks.is_cut(inner)


def test_layers_around_units_are_cut():
    for mark in (psp.unit, lambda layer: layer):
        encoder = Encoder([mark(layers.Dense(4)) for _ in range(3)])
        model = keras.Sequential([keras.Input((4,)), encoder])
        blocks = CompiledBlocks(model, 2, lambda layer: False)
        assert blocks.is_cut(encoder) == (mark is psp.unit)
        assert not blocks.is_cut(encoder.blocks[0])
