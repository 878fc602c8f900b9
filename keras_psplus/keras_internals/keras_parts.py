"""Locations in each Keras version of the parts that this library uses.

Nothing else imports `keras.src`. Keras 3.16 has moved and renamed some of them; one that is not
there is an `ImportError` with its name.
"""

# ruff: noqa: F401 (others import them from here)
from typing import Any

import keras
from keras.src import backend, callbacks, layers, metrics, models, ops, tree
from keras.src.backend.common import global_state, stateless_scope
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.callbacks import backup_and_restore, callback_list, model_checkpoint, progbar_logger
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics
from keras.src.models import model as model_module
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers import epoch_iterator, trainer
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
)
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.utils import file_utils, io_utils


def _in_use(cls: Any, attribute: str) -> Any:
    """The class of Keras that gives another one an attribute.

    Keras itself says which it uses: after one version was installed over another, as
    `keras-nightly` is over the `keras` that TensorFlow brings, files of both lie in one folder.
    """
    for base in cls.__mro__:
        if attribute in vars(base):
            return base
    raise ImportError(
        f"keras_psplus does not fit Keras {keras.__version__}: it relies on "
        f"{cls.__module__}.{cls.__name__}.{attribute}. Install a supported version of Keras. "
        f"Received: keras {keras.__version__}"
    )


# The class of the backend, which `keras.export.ExportArchive()` makes.
ExportArchive = _in_use(type(keras.export.ExportArchive()), "write_out")
# The trainer of all backends, and TensorFlow's.
BaseTrainer = _in_use(keras.Model, "compile_from_config")
TensorFlowTrainer = _in_use(keras.Model, "make_train_function")
# TensorFlow's `keras.Variable`, and the modules of its functions of arrays.
Variable = _in_use(backend.Variable, "handle")
numpy_module = getattr(backend, "ops", backend).numpy
nn_module = getattr(backend, "ops", backend).nn
standardize_dtype = keras.backend.standardize_dtype


def is_class_weight_map(function: Any) -> bool:
    """Whether a function of `Dataset.map` is Keras's own, which weighs rows by their classes."""
    made_by = tf_dataset_adapter.make_class_weight_map_fn
    names = (made_by.__module__, f"{made_by.__qualname__}.<locals>.class_weights_map_fn")
    return (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) == names
