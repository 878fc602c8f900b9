"""`recompute=True`: the same results as without, from activations that are computed twice.

`test_training.py` holds it against plain Keras.
"""

import keras
import pytest

from keras_psplus.pipeline import boundary
from tests.pipeline.models import Counts, X, check_equal, layers, stateful, train

pytestmark = pytest.mark.processes


def test_state_and_seeds_are_used_once(pipeline):
    options = {"microbatches": 3, "schedule": "1f1b"}
    runs = [
        train(pipeline(2, recompute=again, **options), stateful, evaluates=False)
        for again in (False, True)
    ]
    check_equal(*runs)


@pytest.mark.extended
def test_activations_are_computed_twice_in_training_alone(pipeline, monkeypatch):
    repeated = []
    original = boundary.StageReplay._repeat

    def repeat(self, call):
        repeated.append(call.layer.name)
        original(self, call)

    monkeypatch.setattr(boundary.StageReplay, "_repeat", repeat)
    strategy = pipeline(2, microbatches=3, schedule="1f1b", recompute=True)
    keras.backend.clear_session()
    with strategy.scope():
        stack = [layers.Dense(12, name=f"layer_{i}") for i in range(4)]
        model = keras.Sequential([keras.Input((12,)), *stack, Counts(name="counts")])
        model.compile("sgd", "mse")
    model.predict(X, verbose=0)
    model.evaluate(X, X, verbose=0)
    assert not repeated
    model.fit(X[:48], X[:48], batch_size=48, verbose=0)
    # Not a layer that changes a variable which it uses. Each of three micro-batches.
    assert sorted(repeated) == sorted([f"layer_{i}" for i in range(4)] * 3)
