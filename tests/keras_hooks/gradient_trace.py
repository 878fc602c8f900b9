"""Files and hooks that a gradient passes while one step is traced.

A frame counts if one of its arguments, or what it returns, is computed from what the tape has
returned: the replica's gradient, its compressed words, the sum. What only prepares or counts does
not.
"""

import collections
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus.tf_internals import func_graph

ROOT = pathlib.Path(next(iter(keras_psplus.__path__)))
HOOK = "Hook.install.<locals>.replaced"


class GradientTrace:
    """Profile function for `sys.setprofile`.

    Attributes:
        functions: Dict from files of the package to the sets of their functions.
        hooks: Names of the replaced functions, in the order in which a gradient came to them.
    """

    def __init__(self):
        self.functions = collections.defaultdict(set)
        self.hooks = []
        self._of_gradient = {}
        self._is_looking = False

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if self._is_looking or event not in ("call", "return"):
            return
        self._is_looking = True
        try:
            is_of_tape = code.co_name == "gradient" and code.co_filename.endswith("backprop.py")
            if event == "return" and is_of_tape:
                self._of_gradient |= {id(t.op): t.op for t in _tensors(arg)}
            elif ROOT in pathlib.Path(code.co_filename).parents and self._passes(frame, event, arg):
                self._note(frame, event)
        finally:
            self._is_looking = False

    def _passes(self, frame, event, arg):
        if not self._of_gradient:
            return False
        values = [arg] if event == "return" else list(frame.f_locals.values())
        return any(self._is_computed(tensor) for tensor in _tensors(values))

    def _note(self, frame, event):
        code = frame.f_code
        self.functions[str(pathlib.Path(code.co_filename).relative_to(ROOT))].add(code.co_qualname)
        if code.co_qualname == HOOK:
            # The tape's returns a gradient, the others are given some.
            name = frame.f_locals["original"].__name__
            if event == "call" or name == "gradient":
                self.hooks.append(name)

    def _is_computed(self, tensor):
        """Whether a tensor is computed from a gradient, also in a branch."""
        waiting, seen = [tensor.op], set()
        while waiting:
            op = waiting.pop()
            if id(op) in self._of_gradient:
                self._of_gradient[id(tensor.op)] = tensor.op
                return True
            if id(op) not in seen:
                seen.add(id(op))
                waiting += [one.op for one in op.inputs]
                if op.type == "Placeholder" and isinstance(op.graph, func_graph.FuncGraph):
                    captures = op.graph.captures
                    waiting += [a.op for a, b in captures if b is op.outputs[0] and _is_symbolic(a)]
        return False


def _tensors(value):
    leaves = tf.nest.flatten(value, expand_composites=True)
    return [leaf for leaf in leaves if _is_symbolic(leaf)]


def _is_symbolic(value):
    return isinstance(value, tf.Tensor) and not hasattr(value, "numpy")


def trace():
    """The `GradientTrace` of one replica's int8 step, in a process of two devices."""
    strategy = keras_psplus.MultiWorkerMirroredStrategy(compression="int8")
    with strategy.scope():
        layers = [keras.layers.Dense(500, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((200,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.ones((8, 200), "float32"), np.ones((8, 1), "float32")
    # What is made once, as residuals and kernels are, is no part of the way.
    model.train_on_batch(x, y)
    found, train_step = [], model.train_step

    def traced(batch):
        if found:
            return train_step(batch)
        found.append(GradientTrace())
        sys.setprofile(found[0])
        try:
            return train_step(batch)
        finally:
            sys.setprofile(None)

    model.train_step = traced
    model.make_train_function(force=True)
    model.train_on_batch(x, y)
    return found[0]
