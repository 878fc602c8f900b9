import json

import pytest

from keras_psplus.cluster.process import stock_strategies
from keras_psplus.cluster.testing import run_in_processes


def test_refused_in_a_cluster_only(monkeypatch):
    made = []
    stock = type("Stock", (), {"__module__": "tensorflow.python.distribute.any"})
    refusing = stock_strategies._refusing(lambda self: made.append(self), "Mirrored", "Ours")
    stock.__init__ = refusing
    own = type("Own", (stock,), {"__module__": "keras_psplus.any"})
    alone = {"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}
    for text in ("", json.dumps(alone), "{"):
        monkeypatch.setenv("TF_CONFIG", text)
        stock()
    alone["cluster"]["worker"].append("h:2")
    monkeypatch.setenv("TF_CONFIG", json.dumps(alone))
    own()
    with pytest.raises(RuntimeError, match=r"Write `strategy = keras_psplus.Ours\(\)`.*Received"):
        stock()
    assert len(made) == 4


def train():
    import tensorflow as tf

    import keras_psplus

    keras_psplus.task_type()  # As under the launcher's command, which tells tasks to begin.
    for name in ("MultiWorkerMirroredStrategy", "ParameterServerStrategy", "MirroredStrategy"):
        try:
            getattr(tf.distribute, name)()
        except RuntimeError as error:
            print(error)


@pytest.mark.extended
def test_refused_under_the_launcher():
    result = run_in_processes(train, workers=2, timeout=120)
    for log in result.logs.values():
        assert log.count("Write `strategy = keras_psplus.") == 3, log
