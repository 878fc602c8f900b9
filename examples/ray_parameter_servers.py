"""Trains under parameter servers whose tasks are actors of Ray.

    pip install ".[ray]"  # in a checkout of the library
    python examples/ray_parameter_servers.py --workers 2 --ps 1

Ray Train knows workers that are all alike. Here each task of the cluster, chief, workers and
parameter servers, is an actor, which gets TF_CONFIG and runs the script's function. Workers and
servers end with the chief, and their processes with them.
"""

import argparse
import os
import pathlib
import socket

import keras
import numpy as np
import ray

import keras_psplus as psp
from keras_psplus.cluster.environment import plan_tasks


@ray.remote(num_cpus=0)
class Task:
    """One task of a cluster, somewhere in Ray's."""

    def address(self):
        """An address at which this task can listen."""
        with socket.socket() as port:
            port.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{port.getsockname()[1]}"

    def run(self, variables, function, *args):
        """Runs a function as the task that some environment variables tell."""
        os.environ.update(variables)
        return function(*args)


def run(function, *args, workers=2, ps=1, variables=None):
    """Runs a function in the tasks of a cluster; returns what the chief's returns."""
    tasks = [Task.remote() for _ in range(1 + workers + ps)]
    hosts = ray.get([task.address.remote() for task in tasks])
    planned = plan_tasks(workers, ps, chief=True, hosts=hosts)
    results = [
        task.run.remote({**plan.variables, **(variables or {})}, function, *args)
        for task, plan in zip(tasks, planned)
    ]
    # Those that serve end their processes, for which Ray has an error.
    return ray.get(results[0])


def train(epochs, folder):
    """Trains in each task; in workers and servers, the strategy's constructor does not return."""
    keras.utils.set_random_seed(1)
    strategy = psp.ParameterServerStrategy(mode="sync")
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    # A chief that is started again resumes here.
    backup = keras.callbacks.BackupAndRestore(pathlib.Path(folder, "backup"))
    options = {"shuffle": False, "verbose": 0, "callbacks": [backup]}
    history = model.fit(x, x[:, :4], batch_size=16, epochs=epochs, **options).history
    return history["loss"], model.get_weights()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="ray_parameter_servers")
    args = parser.parse_args()
    ray.init(include_dashboard=False)
    loss, _ = run(train, args.epochs, args.folder, workers=args.workers, ps=args.ps)
    print("loss:", " ".join(f"{value:.4f}" for value in loss))


if __name__ == "__main__":
    main()
