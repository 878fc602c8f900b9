"""Fits whose steps are walked: each strategy, compressor, rule of updates and schedule."""

import dataclasses
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.all_reduce.topology.group_topology import Topology
from keras_psplus.cluster.in_process import InProcessCluster

WORKERS = 2
BATCH, WIDTH, IDS, CLASSES = 16, 1024, 4096, 10
# Of the largest variable.
GRADIENT = WIDTH * WIDTH


def dense(policy=None, optimizer="sgd"):
    return compiled(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(WIDTH, activation="relu", dtype=policy),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ],
        optimizer,
    )


def embedding():
    return compiled(
        [
            keras.Input((8,), dtype="int32"),
            keras.layers.Embedding(IDS, 128),
            keras.layers.Flatten(),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(CLASSES),
        ],
        "adam",
    )


def mixed_float16():
    return dense("mixed_float16", keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))


def compiled(layers, optimizer):
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


@dataclasses.dataclass
class Case:
    """A strategy and a model that trains under it.

    Attributes:
        strategy: Function without arguments.
        model: Function without arguments, called in the strategy's scope.
        gpus: Number of GPUs of this process that it uses.
        on_workers: Whether the step is one of remote workers, where what has no device is on a GPU.
    """

    strategy: Callable
    model: Callable = dense
    gpus: int = 2
    on_workers: bool = False


def all_reduce(model=dense, **options):
    return Case(lambda: psp.MultiWorkerMirroredStrategy(**options), model)


class Replicas(Topology):
    """Groups of the replicas of one process, whose number that of workers' would be times."""

    def of_replicas(self, local):
        return self


def topology(*groups, **options):
    def strategy():
        strategy = psp.MultiWorkerMirroredStrategy(**options)
        # Groups of one key are of one size as long as the process lives.
        strategy.extended.take_group_keys(16 * sum(map(len, groups[:1])))
        strategy.extended.set_topology(Replicas(groups))
        return strategy

    return Case(strategy, gpus=sum(map(len, groups)))


def pipeline(**options):
    return Case(lambda: psp.PipelineStrategy(4, **options))


def parameter_server(**options):
    def strategy():
        return psp.ParameterServerStrategy(cluster().cluster_resolver, **options)

    return Case(strategy, on_workers=True)


@functools.cache
def cluster():
    started = InProcessCluster(workers=WORKERS, ps=1)
    started.start()
    return started


def tables(**options):
    return Case(lambda: psp.HybridStrategy(placement="parameter_server", **options), embedding)


def alone(strategy):
    """A case of workers that have one GPU each."""
    return Case(strategy, lambda: dense(optimizer="adam"), gpus=1)


class Unfit(psp.compression.Compressor):
    """A compressor with each of the faults that are looked for."""

    def encode(self, tensor, state, step):
        flat = tf.reshape(tensor, [1, -1])
        # No kernel of GPUs.
        median = tf.raw_ops.NthElement(input=flat, n=flat.shape[1] // 2)
        # In the host's memory, as all int32.
        larger = tf.reshape(tf.cast(flat > median, tf.int32), [-1])
        # Across and back.
        with tf.device("CPU:0"):
            flat = tf.abs(flat)
        return (flat * tf.cast(larger, tf.float32),), state

    def decode(self, payload, shape, dtype, step):
        return tf.reshape(payload[0], shape)

    def wire_bytes(self, shape, dtype, step=None):
        return 4 * tf.TensorShape(shape).num_elements()


# Groups of one process's GPUs are of one size as long as it lives: each dict has its own process.
ALL_REDUCE = {
    "int8": all_reduce(compression="int8"),
    "topk": all_reduce(compression="topk:0.01"),
    "powersgd": all_reduce(compression="powersgd:4"),
    "factors": all_reduce(compression=psp.compression.SufficientFactors("bfloat16")),
    "unfit": all_reduce(compression=Unfit()),
    "rows": all_reduce(embedding, compression="int8"),
    "accumulate": all_reduce(updates="accumulate:2"),
    "diloco": all_reduce(updates="diloco:2"),
    "mixed_float16": all_reduce(mixed_float16),
}
OTHERS = {
    "topology": topology((0, 1), (2, 3)),
    "1f1b": pipeline(schedule="1f1b", activation_compression="int8"),
    "pipedream": pipeline(schedule="pipedream", activation_compression="bf16"),
    # Of remote workers, after which this process's devices have other names.
    "async int8": parameter_server(compression="int8", pull_compression="bf16"),
    "sync int8": parameter_server(mode="sync", compression="int8", pull_compression="int8"),
}
# Of one worker and one parameter server, each a process.
IN_CLUSTER = {"hybrid": tables(compression="int8")}
# Of two workers, each a process with one GPU.
IN_PAIRS = {
    "optimizer in shares": alone(lambda: psp.MultiWorkerMirroredStrategy(shard="optimizer")),
    "all in shares": alone(lambda: psp.MultiWorkerMirroredStrategy(shard="all")),
    "tensor parallel": alone(psp.ModelParallelStrategy),
}
CASES = {**ALL_REDUCE, **OTHERS, **IN_CLUSTER, **IN_PAIRS}
