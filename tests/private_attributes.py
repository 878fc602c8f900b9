"""The private attributes of Keras and TensorFlow that are relied on, and whether they are there."""

import inspect
import types

import keras
import tensorflow as tf
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import generator_data_adapter
from tensorflow.python.data.ops import iterator_ops, structured_function
from tensorflow.python.distribute import input_lib
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from keras_psplus.keras_internals.keras_parts import (
    BaseTrainer,
    ExportArchive,
    TensorFlowTrainer,
    Variable,
    array_data_adapter,
    backup_and_restore,
    base_optimizer,
    epoch_iterator,
    layers,
    loss_scale_optimizer,
    model_module,
    saving_lib,
    tf_optimizer,
    tf_trainer,
)
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

# A class or a module, and the names of attributes.
KERAS = [
    (
        backup_and_restore.BackupAndRestore,
        "_current_epoch _last_batch_seen _save_model",
    ),
    (
        base_optimizer.BaseOptimizer,
        "_accumulated_gradients _apply_weight_decay "
        "_backend_increment_gradient_accumulators _backend_reset_gradient_accumulators "
        "_backend_update_step _clip_gradients _get_variable_index _iterations _learning_rate "
        "_model_variables_moving_average _overwrite_model_variables_with_average_value "
        "_track_variable _trainable_variables _update_model_variables_moving_average "
        "_use_weight_decay",
    ),
    (tf_optimizer.TFOptimizer, "_distributed_tf_update_step _distribution_strategy"),
    (loss_scale_optimizer.LossScaleOptimizer, "inner_optimizer dynamic_scale"),
    (
        epoch_iterator.EpochIterator,
        "_current_iterator _enumerate_iterator _epoch_iterator _num_batches _steps_seen",
    ),
    (tf_trainer.TFEpochIterator, "_distributed_dataset _distribute_strategy _get_iterator"),
    (array_data_adapter.ArrayDataAdapter, "_inputs _num_samples _shuffle"),
    (generator_data_adapter.GeneratorDataAdapter, "_first_batches"),
    (compile_utils.CompileMetrics, "_user_metrics _user_weighted_metrics"),
    (BaseTrainer, "_compile_loss _compile_metrics _compute_loss _loss_tracker _symbolic_build"),
    (TensorFlowTrainer, "_autoconvert_optionals _distribute_strategy _initial_epoch"),
    (
        layers.Layer,
        "_call_has_training_arg _flatten_layers _layers _losses _non_trainable_variables "
        "_seed_generators _trainable_variables",
    ),
    *((cls, "_kernel") for cls in (layers.Dense, layers.EinsumDense)),
    (layers.BatchNormalization, "_reduction_axes"),
    (layers.Embedding, "_embeddings"),
    *(
        (cls, "_compute_attention _key_dense _output_dense _query_dense _value_dense")
        for cls in (layers.MultiHeadAttention, layers.GroupedQueryAttention)
    ),
    (model_module.Model, "_flatten_layers"),
    (keras.Function, "_nodes_by_depth _outputs_struct _run_through_graph"),
    (ExportArchive, "_endpoint_names _endpoint_signatures"),
    (saving_lib, "_save_state"),
    (Variable, "_initialize _initializer _maybe_autocast _trainable _value"),
]
TENSORFLOW = [
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


def has(owner, name):
    """Whether a module has a name, or a class or its methods mention an attribute.

    Args:
        owner: Class or module.
    """
    if hasattr(owner, name):
        return True
    return inspect.isclass(owner) and any(name in code.co_names for code in _codes(owner))


def _codes(cls):
    for base in cls.__mro__:
        for member in vars(base).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, types.FunctionType):
                yield function.__code__
