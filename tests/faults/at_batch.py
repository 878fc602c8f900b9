"""Something that happens after a batch of an epoch."""

import keras


class AtBatch(keras.callbacks.Callback):
    """Calls a function, without arguments, after a batch of an epoch; both count from 0."""

    def __init__(self, epoch, batch, act):
        super().__init__()
        self.at, self.act, self.epoch = (epoch, batch), act, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            self.act()
