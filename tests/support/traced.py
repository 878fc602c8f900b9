"""Functions that TensorFlow traces."""

import contextlib

from tensorflow.python.eager.polymorphic_function import concrete_function


@contextlib.contextmanager
def recorded():
    """Context whose value is the list of functions that are traced in it."""
    functions = []
    init = concrete_function.ConcreteFunction.__init__

    def record(self, *args, **kwargs):
        init(self, *args, **kwargs)
        functions.append(self)

    concrete_function.ConcreteFunction.__init__ = record
    try:
        yield functions
    finally:
        concrete_function.ConcreteFunction.__init__ = init
