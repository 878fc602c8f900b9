"""Replaces methods of Keras by ones that ask whose strategy it is, after checking they fit."""

import functools
import inspect

import keras


def replace(owner, name, parameters):
    """Decorator that puts a function in the place of `owner.name`.

    The decorated function gets the original as its first argument.

    Args:
        owner: Class or module of `keras.src`.
        name: Name of the function to replace.
        parameters: Names of the parameters that the replacement relies on, in order.

    Raises:
        ImportError: If this Keras has no such function, or it takes other parameters.

    Example:

    ```python
    @replace(trainer.TensorFlowTrainer, "fit", ["self"])
    def fit(original, self, *args, **kwargs):
        return original(self, *args, **kwargs)
    ```
    """

    def decorate(replacement):
        original = getattr(owner, name, None)
        where = f"{getattr(owner, '__module__', None) or owner.__name__}.{owner.__name__}.{name}"
        found = list(inspect.signature(original).parameters) if original else None
        if found is None or found[: len(parameters)] != list(parameters):
            raise ImportError(
                f"keras_psplus does not fit Keras {keras.__version__}: it relies on {where} with "
                f"the parameters {list(parameters)}. Install a supported version of Keras. "
                f"Received: {found}"
            )

        @functools.wraps(original)
        def replaced(*args, **kwargs):
            return replacement(original, *args, **kwargs)

        setattr(owner, name, replaced)
        return replacement

    return decorate
