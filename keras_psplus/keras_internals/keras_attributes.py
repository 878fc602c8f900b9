"""The private attributes of Keras that are relied on; checked when the package is imported."""

import keras

from keras_psplus.keras_internals import private_attributes
from keras_psplus.keras_internals.keras_parts import (
    BaseTrainer,
    ExportArchive,
    TensorFlowTrainer,
    Variable,
    array_data_adapter,
    backup_and_restore,
    base_optimizer,
    compile_utils,
    epoch_iterator,
    generator_data_adapter,
    layers,
    loss_scale_optimizer,
    model_module,
    saving_lib,
    tf_optimizer,
    tf_trainer,
)

ATTRIBUTES = [
    (
        backup_and_restore.BackupAndRestore,
        "_current_epoch _last_batch_seen _load_model _save_model _training_metadata_path "
        "_weights_path",
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


def check_keras_attributes() -> None:
    """Checks that Keras has them.

    Raises:
        ImportError: If one is missing; it is named.
    """
    private_attributes.check_attributes(f"Keras {keras.__version__}", ATTRIBUTES)
