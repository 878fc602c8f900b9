"""The examples for Ray equal one process, on a Ray of this machine, also after a lost worker."""

import os
import pathlib
import threading

import keras
import numpy as np
import pytest

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.processes
ROOT = pathlib.Path(__file__).parents[2]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster():
    """A Ray of two nodes on this machine, each with a CPU and as little memory as it takes."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TF_CONFIG", raising=False)
        environment.syspath_prepend(str(ROOT))
        head = {**NODE, "include_dashboard": False}
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        made.second = made.add_node(**NODE)
        ray.init(address=made.address, runtime_env={"env_vars": variables})
        yield made
        ray.shutdown()
        made.shutdown()


def make_trainer(folder, workers, loses, **options):
    from examples import ray_train
    from tests.examples import ray_job

    config = {"folder": str(folder), "loses": loses}
    storage = str(folder / "storage")
    return ray_train.make_trainer(ray_job.train, config, workers, storage, **options)


def check_training(folder, workers, loses, begins, **options):
    """Trains in Ray's workers, and compares with one process that was not disturbed."""
    from examples import ray_train
    from tests.examples import ray_job

    result = make_trainer(folder, workers, loses, **options).fit()
    assert result.error is None
    assert [(folder / f"begins-{rank}").read_text() for rank in range(2)] == begins
    model = ray_job.make_model()
    history = ray_job.fit(model)
    assert result.metrics["epoch"] == ray_job.EPOCHS
    for name in ("loss", "mae"):
        assert result.metrics[name] == pytest.approx(history[name][-1], rel=1e-4)
    found = np.load(folder / "weights.npz")
    for expected, name in zip(model.get_weights(), found.files, strict=True):
        np.testing.assert_allclose(found[name], expected, atol=2e-5)
    # Plain Keras reads what Ray has kept.
    with result.checkpoint.as_directory() as checkpoint:
        saved = ray_job.make_model()
        saved.load_weights(pathlib.Path(checkpoint, ray_train.WEIGHTS))
    for weight, expected in zip(saved.get_weights(), model.get_weights()):
        np.testing.assert_allclose(weight, expected, atol=2e-5)


def test_two_workers_equal_one_process_also_after_a_lost_worker(cluster, tmp_path):
    # All workers were started again, and went on after the epoch that was whole.
    check_training(tmp_path, 2, "worker", ["0 1 ", "0 1 "])


@pytest.mark.extended
@pytest.mark.parametrize(
    "workers, others, begins", [(2, 1, ["0 1 ", "0 "]), (1, 2, ["0 1 ", "1 "])]
)
def test_a_run_goes_on_with_another_number_of_workers(cluster, tmp_path, workers, others, begins):
    with pytest.raises(Exception, match="worker"):
        make_trainer(tmp_path, workers, "worker", failures=0, name="run").fit()
    assert (tmp_path / "lost").exists()
    check_training(tmp_path, others, "worker", begins, name="run")


def test_parameter_servers_as_actors_equal_one_process(cluster, tmp_path):
    from examples import ray_parameter_servers

    loss, weights = ray_parameter_servers.run(
        ray_parameter_servers.train, 2, str(tmp_path), workers=2, ps=1
    )
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    history = model.fit(x, x[:, :4], batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert loss == pytest.approx(history["loss"], rel=1e-5)
    for found, expected in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_one_worker_goes_on_after_a_lost_node(cluster, tmp_path):
    from tests.examples import ray_job

    def lose_node():
        for rank in range(2):
            ray_job.wait_for(tmp_path / f"ready-{rank}", 120)
        cluster.remove_node(cluster.second, allow_graceful=False)
        (tmp_path / "lost").touch()

    loser = threading.Thread(target=lose_node)
    loser.start()
    check_training(tmp_path, (1, 2), "node", ["0 1 ", "0 "])
    loser.join()
