import pytest

from tests.support.jobs import run_script

SCRIPT = """
import os
import tensorflow as tf
from keras_psplus.cluster.in_process import InProcessCluster, logical_devices

assert logical_devices(2) == ["CPU:0", "CPU:1"]
mirrored = tf.distribute.MirroredStrategy(logical_devices(2))
assert mirrored.num_replicas_in_sync == 2
with InProcessCluster(workers=2, ps=1) as cluster:
    cluster.start()  # nothing happens the second time
    assert len(cluster.targets) == 3
    strategy = tf.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(1.0)

    @tf.function
    def add():
        return variable.assign_add(1.0)

    for _ in range(4):
        coordinator.schedule(add)
    coordinator.join()
    assert "job:ps" in variable.device
    print("value", variable.numpy())
try:
    logical_devices(3)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


# In a process of its own: devices are fixed at the first operation, servers stay.
@pytest.mark.processes
def test_in_process_cluster_and_logical_devices(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    log = run_script(tmp_path / "script.py")
    assert "value 5.0" in log
    assert "at the start of the program" in log and "Received: n=3" in log
