"""What is replaced in Keras is what Keras itself uses, whatever else lies in its folder."""

import inspect

import keras
import pytest

from keras_psplus.keras_internals import keras_parts


@pytest.mark.parametrize(
    "user, part",
    [
        (keras.Model, keras_parts.BaseTrainer),
        (keras.Model, keras_parts.TensorFlowTrainer),
        (keras.Variable, keras_parts.Variable),
    ],
)
def test_classes_are_those_that_keras_has_made_its_own_of(user, part):
    assert issubclass(user, part)
    assert part.__module__.startswith("keras.src.")


def test_the_functions_of_arrays_are_those_that_layers_call():
    found = inspect.getclosurevars(keras.ops.take).globals["backend"]
    assert getattr(found, "ops", found).numpy is keras_parts.numpy_module
