"""Ways of training that must equal one process on the same global batches: `CASES` by name."""

import contextlib

import tensorflow as tf

from tests.multi_process import data_cases, layer_cases, metric_cases, step_cases  # noqa: F401
from tests.multi_process.case_models import CASES

__all__ = ["CASES", "TOLERANCE", "without_loss"]

# Sums over replicas are taken in another order than sums over a batch.
TOLERANCE = dict.fromkeys(CASES, 2e-5) | {
    "losses_in_metrics": 2e-6,
    "losses_in_metrics_eagerly": 2e-6,
    "logs_of_metrics": 2e-6,
    "logs_of_metrics_eagerly": 2e-6,
    "perplexity_of_keras_hub": 2e-6,
    "ragged_and_sparse_rows": 2e-6,
    "ragged_and_sparse_rows_by_other_models": 2e-6,
    # Numbers at the border of two of float8 are rounded to either.
    "float8": 1e-4,
    "bfloat16": 2e-2,
    "mixed_precision_skips_overflow": 2e-3,
    "maps_of_own_rows": 1e-6,
    # Its variance is E[x^2] - E[x]^2, which magnifies the difference.
    "synchronised_batch_normalisation": 1e-4,
}


def without_loss(name):
    """A case under all-reduce whose gradients go through compressors that lose nothing."""
    with _compressing(tf.distribute.get_strategy().extended):
        return CASES[name]()


@contextlib.contextmanager
def _compressing(extended):
    from keras_psplus.all_reduce.topology.group_topology import FLAT, compressors_per_hop

    hops = extended._hops
    extended._hops = compressors_per_hop(_lossless(), FLAT)
    extended.set_topology(FLAT)
    try:
        yield
    finally:
        extended._hops = hops
        extended.set_topology(FLAT)


def _lossless():
    """Every route that a compressed gradient can take, and nothing lost on it."""
    from keras_psplus import compression

    class Same(compression.RowCompressor):
        def __init__(self, reducible=False, splits=False, error_feedback=False):
            self.reducible, self.supports_reduce_scatter = reducible, splits
            self.error_feedback = error_feedback

        def encode_rows(self, values, step):
            return (values,)

        def decode_rows(self, payload, row_shape, dtype, step):
            return tf.cast(tf.reshape(payload[0], [-1, *row_shape]), dtype)

        def row_bytes(self, row_shape, dtype, step=None):
            return tf.TensorShape(row_shape).num_elements() * tf.as_dtype(dtype).size

    return compression.ByVariable(
        {
            "*bias": compression.TopK(1.0),
            "*dense_1/kernel": Same(reducible=True, error_feedback=True),
            "*kernel": Same(splits=True, error_feedback=True),
            "*gamma": None,
        },
        default=Same(),
        min_size=0,
        min_rank=0,
    )
