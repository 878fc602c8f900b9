"""Which operations wait for gradients by inputs, and that none of these waits for itself."""

import tensorflow as tf

from keras_psplus.pipeline.boundary import BackwardOperations, delay


def backward_of(layers, gradient):
    """The gradients of some layers, `(inputs, weights)`, traced as a stage does it."""
    turn, of_weights = BackwardOperations(), []
    graph = tf.compat.v1.get_default_graph()
    for inputs, weights in reversed(layers):
        first = len(graph.get_operations())
        of_weights.append(tf.matmul(inputs, gradient, transpose_a=True))
        gradient = tf.matmul(gradient, weights, transpose_b=True)
        turn.note(graph.get_operations()[first:], [gradient])
    return turn, gradient, of_weights


def layers_of(count):
    return [
        (tf.compat.v1.placeholder(tf.float32, [2, 3]), tf.compat.v1.placeholder(tf.float32, [3, 3]))
        for _ in range(count)
    ]


def waits_for(tensor):
    return [op.name for op in tensor.op.control_inputs]


def has_cycle(graph):
    done = set()
    left = graph.get_operations()
    while True:
        ready = [
            op
            for op in left
            if all(t.op in done for t in op.inputs) and all(o in done for o in op.control_inputs)
        ]
        if not ready:
            return bool(left)
        done.update(ready)
        left = [op for op in left if op not in done]


def test_all_gradients_by_weights_wait_for_the_last_by_inputs():
    with tf.Graph().as_default():
        turn, last, of_weights = backward_of(layers_of(3), tf.ones([2, 3]))
        delay([turn])
        assert [waits_for(one) for one in of_weights] == [[last.op.name]] * 3
        assert waits_for(last) == []


def test_what_gradients_by_inputs_need_does_not_wait():
    with tf.Graph().as_default():
        layers = layers_of(2)
        turn, _, (second, first) = backward_of(layers, tf.ones([2, 3]))
        # As with a penalty of gradients: a later turn is computed of a gradient by weights.
        other, last, _ = backward_of(layers, tf.matmul(layers[0][0], first))
        turn.note(other.operations, [last])
        delay([turn])
        assert last.op.name not in waits_for(first)
        assert waits_for(second) == [last.op.name]
        assert not has_cycle(tf.compat.v1.get_default_graph())


def test_the_first_layer_of_a_model_has_no_gradient_by_inputs():
    with tf.Graph().as_default():
        graph = tf.compat.v1.get_default_graph()
        turn, last, (of_weights,) = backward_of(layers_of(1), tf.ones([2, 3]))
        inputs = tf.compat.v1.placeholder(tf.float32, [2, 3])
        first = len(graph.get_operations())
        of_first = tf.matmul(inputs, last, transpose_a=True)
        turn.note(graph.get_operations()[first:], [])
        delay([turn])
        assert waits_for(of_first) == waits_for(of_weights) == [last.op.name]
