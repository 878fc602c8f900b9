"""The private attributes of TensorFlow that are relied on; checked when the package is imported."""

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops, structured_function
from tensorflow.python.distribute import input_lib
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from keras_psplus.keras_internals import private_attributes
from keras_psplus.tf_internals import (
    batch_op,
    collective_all_reduce_strategy,
    context,
    cross_device_utils,
    data_cardinality,
    data_distribute,
    dataset_ops,
    def_function,
    distribute_lib,
    distributed_values,
    framework_ops,
    map_op,
    one_device_strategy,
    parameter_server_strategy_v2,
    prefetch_op,
    ps_values,
    repeat_op,
    resource_variable_ops,
    shard_op,
    sharded_variable,
    skip_op,
    take_op,
)

ATTRIBUTES = [
    # Eager and graph execution.
    (ConcreteFunction, "_call_flat"),
    (context.Context, "_context_handle"),
    (def_function.Function, "_clone"),
    (framework_ops.Graph, "_add_device_to_stack _get_function"),
    (framework_ops.Operation, "_add_control_input _is_stateful _set_device _update_input"),
    # Variables and checkpoints.
    (resource_variable_ops, "_variable_handle_from_shape_and_dtype"),
    (resource_variable_ops.BaseResourceVariable, "_handle_name"),
    (sharded_variable.ShardedVariableMixin, "_var_offsets"),
    # Data.
    (batch_op, "_BatchDataset _ParallelBatchDataset"),
    (batch_op._BatchDataset, "_batch_size _drop_remainder"),
    (
        batch_op._ParallelBatchDataset,
        "_batch_size _deterministic _drop_remainder _num_parallel_calls",
    ),
    (data_cardinality, "_AssertCardinalityDataset"),
    (data_cardinality._AssertCardinalityDataset, "_expected_cardinality"),
    (data_distribute, "_AutoShardDataset"),
    (dataset_ops, "_OptionsDataset _VariantDataset"),
    (dataset_ops.UnaryDataset, "_input_dataset"),
    (input_lib.DistributedDataset, "_cloned_datasets _original_dataset"),
    (input_lib.DistributedDatasetsFromFunction, "_dataset_fn _datasets"),
    (input_lib.DistributedIterator, "_iterators"),
    (iterator_ops.OwnedIterator, "_iterator_resource"),
    (map_op, "_MapDataset _ParallelMapDataset"),
    (map_op._MapDataset, "_force_synchronous _map_func _preserve_cardinality"),
    (
        map_op._ParallelMapDataset,
        "_deterministic _map_func _num_parallel_calls _preserve_cardinality "
        "_use_unbounded_threadpool",
    ),
    (prefetch_op, "_PrefetchDataset"),
    (prefetch_op._PrefetchDataset, "_buffer_size"),
    (repeat_op, "_RepeatDataset"),
    (repeat_op._RepeatDataset, "_count"),
    (shard_op, "_ShardDataset"),
    (shard_op._ShardDataset, "_index _num_shards"),
    (skip_op, "_SkipDataset"),
    (skip_op._SkipDataset, "_count"),
    (structured_function.StructuredFunctionWrapper, "_func"),
    (take_op, "_TakeDataset"),
    (take_op._TakeDataset, "_count"),
    (tf.data.Dataset, "_as_serialized_graph _inputs _variant_tensor"),
    # tf.distribute.
    (
        collective_all_reduce_strategy.CollectiveAllReduceExtended,
        "_container_strategy _cross_device_ops _host_cross_device_ops _id_in_cluster "
        "_num_replicas_in_sync",
    ),
    (cross_device_utils.CollectiveReplicaLauncher, "_collective_keys _group_key _group_size"),
    (distribute_lib.ReplicaContext, "_replica_id"),
    (one_device_strategy.OneDeviceExtended, "_container_strategy _local_results"),
    (
        distributed_values.DistributedVariable,
        "_get_on_device_or_primary _is_mirrored _packed_var _primary",
    ),
    (distributed_values.PerReplicaSpec, "_value_specs"),
    # Parameter servers.
    (parameter_server_strategy_v2.ParameterServerStrategyV2, "_verify_args_and_config"),
    (ps_values.DistributedTable, "_coordinator _maybe_build_distributed_table _wrapped_creator"),
    (
        parameter_server_strategy_v2.ParameterServerStrategyV2Extended,
        "_resource_creator_scope _container_strategy _num_ps _variable_partitioner",
    ),
]


def check_tensorflow_attributes() -> None:
    """Checks that TensorFlow has them.

    Raises:
        ImportError: If one is missing; it is named.
    """
    private_attributes.check_attributes(f"TensorFlow {tf.__version__}", ATTRIBUTES)
