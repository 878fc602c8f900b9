"""Data of a process that has several replicas and no cluster."""

import subprocess
import sys

import pytest

SCRIPT = """
from keras_psplus.cluster.in_process import logical_devices

logical_devices(2)
import keras, numpy as np, sys, tensorflow as tf
import keras_psplus as psp

strategy = psp.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
options = tf.data.Options()
policy = getattr(tf.data.experimental.AutoShardPolicy, sys.argv[1])
options.experimental_distribute.auto_shard_policy = policy
arrays = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
data = tf.data.Dataset.from_tensor_slices(arrays).batch(4).with_options(options)
first, second = model.fit(data, epochs=2, verbose=0).history["loss"]
print("the loss falls:", second < first)
"""


@pytest.mark.parametrize("policy", ["OFF"])
def test_its_own_share_is_all_of_the_data(policy):
    command = [sys.executable, "-c", SCRIPT, policy]
    result = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stderr
    assert "the loss falls: True" in result.stdout
