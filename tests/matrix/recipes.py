"""The modules with recipes of names."""

import importlib

import keras

_MODULES = (
    *("data", "programs", "arguments", "optimizers", "values", "losses", "layers"),
    *("layer_arguments", "mixtures"),
)


_classes = {}


def import_all():
    """Imports the modules, also where their classes are registered no longer."""
    for name in _MODULES:
        importlib.import_module(f"tests.matrix.{name}")
    _classes.update(keras.saving.get_custom_objects())
    keras.saving.get_custom_objects().update(_classes)
