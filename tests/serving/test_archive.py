"""Archives of functions and exports under strategies whose variables are not in one process."""

import os
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster import equals_one_process, makes_scope, run
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


def trained(scope):
    with scope():
        model = made()
    x = np.random.default_rng(0).integers(0, 12, (16, 2)).astype("int32")
    model.fit(x, np.ones((16, 2), "float32"), batch_size=8, shuffle=False, verbose=0)
    return model, tf.constant(x)


def made():
    ids = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(12, 4, name="table")(ids)
    h = keras.layers.Dense(6, "tanh")(keras.layers.Flatten()(table))
    model = keras.Model(ids, keras.layers.Dense(2)(h))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@makes_scope
def exported(scope, way):
    """Predictions of a model that is written, and read by TensorFlow."""
    model, x = trained(scope)
    expected = model.predict(x, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "exported")
        if way == "model":
            model.export(path, verbose=False)
        else:
            archive = keras.export.ExportArchive()
            archive.track(model)
            spec = [keras.InputSpec(shape=(None, 2), dtype="int32")]
            archive.add_endpoint("doubled", lambda x: 2.0 * model(x, training=False), spec)
            archive.write_out(path, verbose=False)
        loaded = tf.saved_model.load(path)
        found = loaded.serve(x) if way == "model" else loaded.doubled(x) / 2.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    # Training goes on with the variables of the strategy.
    model.fit(x.numpy(), np.ones((16, 2), "float32"), batch_size=8, shuffle=False, verbose=0)
    return model, {}


@makes_scope
def traced_before(scope):
    model, x = trained(scope)
    archive = keras.export.ExportArchive()
    archive.track(model)
    function = tf.function(lambda x: model(x, training=False))
    function(x)
    archive.add_endpoint("serve", function)
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(ValueError, match="it was traced before, or the archive") as error:
            archive.write_out(os.path.join(folder, "exported"), verbose=False)
    return {"message": str(error.value)}


@pytest.mark.parametrize(
    "layout, way",
    [
        ("stages2", "archive"),
        *extended(("all2", "archive"), ("hybrid22", "model")),
        *extended(("ar2", "archive"), ("tp2", "archive"), ("hybrid22", "archive")),
        *extended(("sync_sharded", "archive")),
    ],
)
def test_equals_predictions(layout, way):
    equals_one_process(layout, exported, way=way)


def test_functions_that_were_traced_before_are_refused():
    run("all2", traced_before, same=False, may_show_errors=True)
