"""Trains plain Keras as a reference in fewer traces, to the same bits."""

import contextlib
import functools

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

_defers = TensorFlowTrainer._maybe_symbolic_build
_is_first = False


def build_first():
    """Has plain Keras build a model, its metrics and its optimizer before it traces a step.

    It makes their variables in the first step otherwise, which TensorFlow then traces once more to
    make none. Under a strategy, Keras and this library build first as well. For scripts whose plain
    models are references; what shows how plain Keras trains has to do without.
    """
    global _is_first
    _is_first = True


@contextlib.contextmanager
def built_first():
    """Does so in a block."""
    global _is_first
    before, _is_first = _is_first, True
    try:
        yield
    finally:
        _is_first = before


# Never taken back, as the library may have replaced it by then.
@functools.wraps(_defers)
def _build(self, iterator=None, data_batch=None):
    defers = not _is_first or self._distribute_strategy is not None or self.run_eagerly
    if defers or not _has_kerass_steps(self):
        return _defers(self, iterator=iterator, data_batch=data_batch)
    batch = iterator._distributed_dataset.element_spec if iterator else data_batch
    parts = [part for part in keras.tree.flatten(batch) if part is not None]
    # Ragged and sparse rows would be taken for dense ones.
    if all(isinstance(part, tf.TensorSpec) or hasattr(part, "ndim") for part in parts):
        self._symbolic_build(data_batch=batch)
    return None


TensorFlowTrainer._maybe_symbolic_build = _build


def _has_kerass_steps(model):
    steps = "train_step", "test_step"
    return all(getattr(type(model), one) is getattr(TensorFlowTrainer, one) for one in steps)
