"""One base class for all errors of a cluster; lost tasks are named in attributes, too."""

import pytest

import keras_psplus as psp
from keras_psplus import all_reduce, cluster, errors, hybrid
from keras_psplus.core.jobs import failure
from keras_psplus.parameter_server import scheduler as servers
from keras_psplus.pipeline import engine as stages


def test_every_error_has_the_base_class():
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(kind, errors.DistributedError) for kind in kinds)
    lost = {kind for kind in kinds if issubclass(kind, errors.TaskLostError)}
    assert {kind for kind in kinds if kind.__name__.endswith("LostError")} == lost
    # What scripts catch today.
    assert issubclass(errors.ClusterConfigError, ValueError)
    assert all(issubclass(k, RuntimeError) for k in (*lost, errors.ClusterStartupError))


def test_names_in_other_modules_are_the_same_classes():
    assert psp.errors is errors
    assert psp.PeerLostError is all_reduce.PeerLostError is errors.PeerLostError
    assert cluster.ClusterConfigError is errors.ClusterConfigError
    assert cluster.ClusterStartupError is errors.ClusterStartupError
    assert hybrid.TableServerError is errors.TableServerError
    assert servers.WorkersLostError is errors.WorkersLostError
    assert stages.StageLostError is errors.StageLostError


@pytest.mark.parametrize(
    "message, tasks",
    [
        (failure.lost_message("worker-1 (a.b:2)", "worker-0", "reset"), [("worker-1", "a.b:2")]),
        (
            "None: worker-0 ([::1]:1), ps-12 (h:2). Received",
            [("worker-0", "[::1]:1"), ("ps-12", "h:2")],
        ),
        (failure.lost_message("Another worker", "worker-0", "x (a:1)"), []),
    ],
)
def test_lost_tasks_are_attributes(message, tasks):
    error = errors.PeerLostError(message)
    assert error.tasks == tuple(tasks)
    assert (error.task, error.address) == (tasks[0] if tasks else (None, None))
    assert str(error) == message
