"""Perceptron that ends each work's model, and its compilation with any Keras."""


def compiled(keras, inputs, outputs, widths, learning_rate, **options):
    """A compiled model.

    Args:
        keras: Keras 3, or tf_keras.
        inputs: The model's.
        outputs: What the perceptron is fed with.
        widths: Of its hidden layers and its output.
        learning_rate: Of SGD.
        **options: Further arguments of `compile`.
    """
    for width in widths[:-1]:
        outputs = keras.layers.Dense(width, activation="relu")(outputs)
    model = keras.Model(inputs, keras.layers.Dense(widths[-1])(outputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(learning_rate), loss, **options)
    return model
