"""Names that a user of Keras expects, alike on all strategies, and deprecated ones."""

import inspect

import pytest

import keras_psplus as psp
from keras_psplus.arguments import renamed

STRATEGIES = (
    psp.MultiWorkerMirroredStrategy,
    psp.ParameterServerStrategy,
    psp.HybridStrategy,
    psp.PipelineStrategy,
)


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_timeouts_have_the_same_names(kind):
    parameters = inspect.signature(kind.__init__).parameters
    assert {"startup_timeout", "heartbeat_timeout", "stall_warning"} <= set(parameters)


def test_a_deprecated_argument_is_taken_and_warns():
    with pytest.warns(DeprecationWarning, match="`old` is now `new`"):
        assert renamed("old", 5, "new", 60) == 5
    assert renamed("old", None, "new", 60) == 60
    with (
        pytest.warns(DeprecationWarning, match="`worker_timeout` is now `heartbeat_timeout`"),
        pytest.raises(ValueError, match=r"Received: heartbeat_timeout=-1"),
    ):
        psp.ParameterServerStrategy(worker_timeout=-1)


def test_the_strategy_of_the_environment_has_two_names():
    assert psp.strategy is psp.strategy_from_env
