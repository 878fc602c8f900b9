"""Pipelines of one process, whose stages share its one device."""

import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.core.graph import compiled_calls
from keras_psplus.pipeline import strategy
from tests import references
from tests.pipeline.models import CPU, train


@pytest.fixture
def pipeline(monkeypatch):
    """Makes a strategy with some stages in each pipeline."""

    def make(count=2, **options):
        devices = [CPU] * count * options.get("pipelines", 1)
        monkeypatch.setattr(strategy, "local_devices", lambda: devices)
        return psp.PipelineStrategy(**options)

    return make


@pytest.fixture(scope="module")
def alone():
    """Plain Keras's results."""
    results = {}

    def get(make, **options):
        key = make, *options.items()
        if key not in results:
            results[key] = train(tf.distribute.get_strategy(), make, **options)
        return results[key]

    with psp.single_process(), references.built_first():
        yield get


class Counted(compiled_calls.CompiledCalls):
    """Counts calls, and the functions that they are of."""

    found = ()

    def check(self):
        Counted.found = self.count, sum(map(len, self._functions.values())), self.reasons
        super().check()


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr("keras_psplus.core.distributed_engine.CompiledCalls", Counted)
    return Counted
