"""The one door to TensorFlow's internals: nothing else imports `tensorflow.python`.

What is not there any more is named when the package is imported. A test has the private attributes
that are relied on.
"""

# ruff: noqa: F401 (others import them from here)
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2, data_service_pb2
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.data.experimental.ops import cardinality as data_cardinality
from tensorflow.python.data.experimental.ops import distribute as data_distribute
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    map_op,
    prefetch_op,
    repeat_op,
    shard_op,
    skip_op,
    take_op,
)
from tensorflow.python.data.util import structure as data_structure
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    device_util,
    distribute_lib,
    distribute_utils,
    load_context,
    multi_worker_util,
    one_device_strategy,
    parameter_server_strategy_v2,
    ps_values,
    sharded_variable,
    values_util,
)
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.eager import cancellation, context, def_function, execute, executor, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import (
    auto_control_deps_utils,
    func_graph,
    op_def_registry,
    tensor_conversion_registry,
)
from tensorflow.python.framework import kernels as registered_kernels
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import collective_ops, control_flow_util, resource_variable_ops
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow_func_graphs
from tensorflow.python.trackable import base as trackable_base
from tensorflow.python.types import core as types_core
from tensorflow.python.util import nest
