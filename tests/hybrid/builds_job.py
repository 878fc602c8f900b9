"""A worker that builds dynamic tables, one after the other, until the chief is killed."""

import os
import signal
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras

import keras_psplus as psp

strategy = psp.HybridStrategy(startup_timeout=60, heartbeat_timeout=8)
with strategy.scope():
    for number in range(1000):
        if number == 2 and strategy.is_chief:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        ids = keras.Input((2,), dtype="int64")
        psp.layers.DynamicEmbedding(4, name=f"table_{number}")(ids)
        print("built", number, flush=True)
