"""Learns to read handwritten digits in the workers of Ray Train.

    pip install ".[ray]"  # in a checkout of the library
    python examples/ray_train.py --workers 2

Ray's `TensorflowTrainer` starts the workers, and writes TF_CONFIG for each of them: the strategy
finds its cluster there. Metrics and checkpoints go to Ray at each epoch's end. When a worker is
lost, Ray starts all of them again, and training resumes at the last checkpoint. So does a run of
the same `--storage` and `--name`, also with another number of workers.
"""

import argparse
import json
import pathlib
import tempfile

import keras
import ray
from ray import train
from ray.train.tensorflow import TensorflowTrainer

import keras_psplus as psp

WEIGHTS, EPOCH = "model.weights.h5", "epoch.json"


class Report(keras.callbacks.Callback):
    """Gives Ray the metrics of each epoch, and from the first worker a checkpoint."""

    def on_epoch_end(self, epoch, logs=None):
        rank = train.get_context().get_world_rank()
        with tempfile.TemporaryDirectory() as folder:
            # Under some strategies all workers have a part in this.
            self.model.save_weights(pathlib.Path(folder, WEIGHTS))
            pathlib.Path(folder, EPOCH).write_text(json.dumps(epoch + 1))
            checkpoint = train.Checkpoint.from_directory(folder) if rank == 0 else None
            # All workers come here: it waits for them.
            train.report({**logs, "epoch": epoch + 1}, checkpoint=checkpoint)


def restore(model, strategy):
    """Reads Ray's last checkpoint, if there is one; returns the epoch to go on with."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with strategy.scope():
        # Its state is read as well, so it must be there.
        model.optimizer.build(model.trainable_variables)
    with checkpoint.as_directory() as folder:
        model.load_weights(pathlib.Path(folder, WEIGHTS))
        return json.loads(pathlib.Path(folder, EPOCH).read_text())


def train_digits(config):
    """Trains on each worker."""
    from examples import digits

    keras.utils.set_random_seed(config["seed"])
    (x, y), _ = digits.load_data()
    strategy = psp.strategy_from_env()
    with strategy.scope():
        model = digits.build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        *(x, y),
        batch_size=config["batch_size"],
        epochs=config["epochs"],
        initial_epoch=restore(model, strategy),
        callbacks=[Report()],
        verbose=0,
    )


def make_trainer(function, config, workers, storage, failures=2, name=None, **scaling):
    """Makes Ray's trainer of a function.

    `workers` may be a pair, of the least and the most.
    """
    return TensorflowTrainer(
        function,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=workers, **scaling),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=128, help="of all workers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--storage", help="folder for checkpoints that all nodes see")
    parser.add_argument("--name", help="name of the run, which goes on if it was broken off")
    args = parser.parse_args()
    root = str(pathlib.Path(__file__).resolve().parents[1])
    # For what lies beside this file; on a cluster, give Ray a `working_dir`.
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": root}}, include_dashboard=False)
    storage = args.storage or tempfile.mkdtemp(prefix="ray_digits_")
    result = make_trainer(train_digits, vars(args), args.workers, storage, name=args.name).fit()
    accuracy = result.metrics["accuracy"]
    print(f"digits: accuracy={accuracy:.4f} workers={args.workers}")
    print("the last checkpoint:", result.checkpoint.path)


if __name__ == "__main__":
    main()
