"""A training job in which one worker fails at a given step, in a given way.

failing_job.py HOW VICTIM STEP
"""

import os
import signal
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp

how, victim, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = {"updates": psp.updates.LocalSGD(4)} if how == "stop between averages" else {}
strategy = psp.MultiWorkerMirroredStrategy(startup_timeout=60, heartbeat_timeout=8, **options)
is_victim = strategy.task.task_index == victim


class Fail(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        # It hangs twice: the test has it go on once.
        at = (step, step + 20) if how == "hang" else (step,)
        if self.steps not in at or not is_victim:
            return
        print("failing now", flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "raise":
            raise ArithmeticError("the victim's own error")
        if how == "leave":
            sys.exit(0)
        if how.startswith("stop"):
            self.model.stop_training = True


with strategy.scope():
    units = 5 if how == "other shape" and is_victim else 4
    layers = [keras.Input((8,)), keras.layers.Dense(units, name="first"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
if how == "raise early" and is_victim:
    raise ArithmeticError("the victim's own error")
x = np.ones((200, 8), "float32")
# After the step that it ends with, the victim is at one of these, or at the end of the epoch.
more = {"validation_data": (x, x[:, :1])} if how == "stop and evaluate" else {}
model.fit(x, x[:, :1], batch_size=20, epochs=30, verbose=0, callbacks=[Fail()], **more)
print("trained to the end", flush=True)
