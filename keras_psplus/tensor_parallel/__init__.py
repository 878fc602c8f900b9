"""Tensor parallelism: each layer's weights are cut, and workers of a row share one mini-batch.

The paper: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism", 2019. A column cut and a row cut meet without a collective in between:

    worker-0    x -> f -> x A0 -> act -> (x A0) B0 \\
                                                     sum (g) -> y
    worker-1    x -> f -> x A1 -> act -> (x A1) B1 /

Forward, f copies and g sums over the workers; backward, f sums and g copies. Layers that have no
rule for cut weights compute with gathered ones, so that every model trains as in one process.
"""

from keras_psplus.tensor_parallel.mesh import DeviceMesh, LayoutMap, TensorLayout
from keras_psplus.tensor_parallel.mesh_row import MeshRow
from keras_psplus.tensor_parallel.strategy import ModelParallelStrategy

__all__ = ["DeviceMesh", "LayoutMap", "MeshRow", "ModelParallelStrategy", "TensorLayout"]
