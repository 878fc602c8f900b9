"""The public names of Keras, family by family, as Keras itself lists them."""

import inspect

import keras

_MODULES = {
    "layers": keras.layers,
    "optimizers": keras.optimizers,
    "schedules": keras.optimizers.schedules,
    "losses": keras.losses,
    "metrics": keras.metrics,
    "regularizers": keras.regularizers,
    "constraints": keras.constraints,
    "callbacks": keras.callbacks,
    "initializers": keras.initializers,
    "activations": keras.activations,
    "random": keras.random,
}
# Methods and constructors whose arguments are names.
_CALLS = {
    "compile": keras.Model.compile,
    "fit": keras.Model.fit,
    "evaluate": keras.Model.evaluate,
    "predict": keras.Model.predict,
}
# Functions that make an object of a text, or a text of an object.
_CONVERTERS = {"get", "serialize", "deserialize"}
_MAKERS_OF_DATA = (
    *("PyDataset", "split_dataset", "timeseries_dataset_from_array"),
    *(f"{kind}_dataset_from_directory" for kind in ("image", "text", "audio")),
)

_OTHER_BACKENDS = "a layer of JAX, Flax or PyTorch, which Keras on TensorFlow cannot run"
_SCIPY = "Keras computes its windows by scipy, which the tests do not install"
# By family and name: why it has no recipe.
EXEMPT = {
    "layers": {
        **dict.fromkeys(("FlaxLayer", "JaxLayer", "TorchModuleWrapper"), _OTHER_BACKENDS),
        "STFTSpectrogram": _SCIPY,
    },
    "initializers": {"STFT": _SCIPY, "STFTInitializer": _SCIPY},
    "callbacks": {"OrbaxCheckpoint": "needs Orbax, which the tests do not install"},
}


def of_keras():
    """Returns the names of each family, without other names of the same thing."""
    names = {family: _unique(module) for family, module in _MODULES.items()}
    names |= {call: _arguments(function) for call, function in _CALLS.items()}
    classes = [getattr(keras.optimizers, name) for name in names["optimizers"]]
    names["arguments of optimizers"] = sorted(
        {
            name
            for one in classes
            if inspect.isclass(one) and issubclass(one, keras.optimizers.Optimizer)
            for name in _arguments(one.__init__)
        }
        - {"learning_rate", "args"}
    )
    names["data"] = sorted(name for name in _MAKERS_OF_DATA if hasattr(keras.utils, name))
    return names


def _unique(module):
    found = {}
    for name in dir(module):
        one = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(one) or name in _CONVERTERS:
            continue
        if id(one) not in found or name == one.__name__:
            found[id(one)] = name
    return sorted(found.values())


def _arguments(function):
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "kwargs", "name")]
