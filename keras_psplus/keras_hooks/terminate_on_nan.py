"""`TerminateOnNaN` under `ParameterServerStrategy`: it ends the epoch in which the loss is NaN.

The callback looks at the logs of each batch. Steps of the last ones come back when Keras has no
batch left to show them with, so they are looked at once the epoch's steps are all back.
"""

import weakref

from keras.src import callbacks as keras_callbacks
from keras.src.callbacks import callback_list
from keras.src.trainers import trainer

from keras_psplus.keras_hooks import updates
from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.keras_hooks.patching import replace

# The callbacks of the `fit` that a model is in.
_callbacks = weakref.WeakKeyDictionary()


def install():
    """Installs this module's hooks."""
    replace(callback_list.CallbackList, "on_train_begin", ["self", "logs"])(_begin)
    replace(callback_list.CallbackList, "on_train_batch_end", ["self", "batch", "logs"])(_count)
    replace(trainer.Trainer, "_get_metrics_result_or_logs", ["self", "logs"])(_end_of_epoch)


def _strategy_of(model):
    return asynchronous(getattr(model, "_distribute_strategy", None))


def _begin(original, self, logs=None):
    if _strategy_of(getattr(self, "_model", None)) is not None:
        _callbacks[self._model] = weakref.ref(self)
        # Of a step before this training, by `train_on_batch`.
        _take_bad_loss(self._model)
    return original(self, logs)


def _take_bad_loss(model):
    take = getattr(model.train_function, "take_bad_loss", None)
    return take() if take is not None else None


def _count(original, self, batch, logs=None):
    self._last_batch = batch
    return original(self, batch, logs)


def _end_of_epoch(original, self, logs):
    # Asked for before validation, and before other callbacks see the epoch's end and save.
    if _strategy_of(self) is not None and not updates.evaluating and self in _callbacks:
        loss = _take_bad_loss(self)
        found = _callbacks[self]()
        if loss is not None and found is not None:
            for callback in found.callbacks:
                if isinstance(callback, keras_callbacks.TerminateOnNaN):
                    callback.on_train_batch_end(found._last_batch, {"loss": loss})
    return original(self, logs)
