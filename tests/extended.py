"""Tests that `make test` leaves out and `make test-all` runs: more of what others show.

Each says on one more combination, optimizer, kind of dataset or fault what a test of `make test`
says of the path that they share. A path, a refusal or an error of its own is never one of them.
pytest runs them too, unless it is asked for `-m "not extended"`.
"""

import fnmatch

import pytest

# By file, patterns of the tests' names. In a name, brackets are as they are.
TESTS = {
    "multi_process/test_equals_one_process.py": [
        *(
            f"test_two_workers[{name}]"
            for name in (
                *("bfloat16", "class_weight_and_validation_split", "generator"),
                *("dataset_of_named_tuples_repeated", "mean_with_sample_weight"),
                *("own_loss_with_an_empty_replica", "train_step_as_function"),
                *("early_stopping_and_plateau", "metrics", "adamw_with_schedule_and_average"),
                *("dataset_of_unknown_length", "several_steps_in_a_loop", "logs_of_every_batch"),
                *("metric_and_loss_functions_of_whole_batches", "gradient_penalty"),
                # Compressed gradients, or asynchronous steps, have these.
                *("steps_per_execution", "grain_dataset", "moving_average_after_skipped_steps"),
                # As `losses_in_metrics`, `logs_of_metrics` and `fit_of_ragged_and_sparse_rows`.
                *("perplexity_of_keras_hub", "losses_in_metrics_eagerly"),
                *("logs_of_metrics_eagerly", "on_batch_and_predict_of_ragged_and_sparse_rows"),
                "convolutions_of_single_rows",
            )
        ),
        "test_three_workers[maps_of_own_rows]",
        "test_one_process[devices-synchronised_batch_normalisation]",
        "test_one_process[pipelines-gradient_accumulation_in_loop]",
        *(f"test_one_process[async-{name}]" for name in ("losses_in_metrics", "logs_of_metrics")),
        "test_one_process[async-step_of_its_own_without_call]",
        "test_one_process[async_sharded-mixed_precision_skips_overflow]",
        "test_one_process[sync_sharded-gradient_accumulation_in_loop]",
        *(
            f"test_one_process[async-{name}]"
            for name in (
                *("gradient_penalty", "generator", "py_dataset", "train_step_as_function"),
                *("several_inputs_and_outputs", "synchronised_batch_normalisation"),
                *("steps_per_execution", "dataset_of_unknown_length", "batches_of_known_size"),
                *("random_predictions", "metrics", "gradient_accumulation_in_loop", "on_batch"),
            )
        ),
        *(
            f"test_one_process[async_sharded-{name}]"
            for name in (
                *("adamw_with_schedule_and_average", "moving_average_after_skipped_steps"),
                *("several_steps_in_a_loop", "masked_sequence_loss", "global_clipnorm"),
            )
        ),
        *("test_two_workers[several_inputs_and_outputs]", "test_two_workers[global_clipnorm]"),
        *("test_one_process[sync-grain_dataset]", "test_one_process[pipeline-grain_dataset]"),
        # test_sync.py and test_sync_overlap.py have these in real processes.
        "test_one_process[sync-mixed_precision_skips_overflow]",
        "test_one_process[sync-embeddings_of_several_widths]",
        # `losses_in_metrics` shows it, and the library is of two workers.
        "test_one_process[sync-perplexity_of_keras_hub]",
        *("test_three_workers[evaluate_and_predict]", "*_two_devices_each[evaluate_and_predict]"),
        "test_two_workers_that_compress_without_loss[embeddings_of_several_widths]",
        "test_two_workers_that_compress_without_loss[run_eagerly]",
        "test_one_process[sync-own_loss_with_an_empty_replica]",
        "test_one_process[sync-regularisers_and_constraint]",
        "test_one_process[sync_sharded-adamw_with_schedule_and_average]",
        "test_one_process[devices-on_batch]",
        "test_one_process[devices-own_loss_as_vector]",
        "test_one_process[devices-run_eagerly]",
        "test_one_process[devices-convolutions_of_single_rows]",
        "test_one_process[devices-gradient_accumulation_in_loop]",
        "test_one_process[devices-mixed_precision_skips_overflow]",
        "test_one_process[sync-convolutions_of_single_rows]",
        "test_one_process[sync-steps_per_execution]",
        "test_one_process[pipeline-dataset_of_unknown_length]",
        "test_one_process[pipeline-moving_average_after_skipped_steps]",
        "test_one_process[pipeline-on_batch]",
        "test_one_process[pipeline-logs_of_every_batch]",
        "test_one_process[pipelines-gradient_penalty]",
        "test_one_process[pipelines-mixed_precision_skips_overflow]",
        # Of one pipeline and of whole variables.
        "test_one_process[pipelines-positions_of_tokens]",
        "test_one_process[sync_sharded-positions_of_tokens]",
    ],
    "multi_process/test_behaviours.py": [
        *("*[arrays_shuffled_by_batch*", "test_batches_are_shuffled_within"),
        *("*[unseeded_dataset_with_cache_and_repeat]", "test_repeated_dataset_is_seen_whole"),
        *("*[data_service_in_functions]", "test_the_data_service_is_found_in_functions"),
        *("*[changing_length_in_several_steps]", "*[shuffled_py_dataset*"),
        *("*[convolutions_of_shares_of_unequal_length]", "*[batch_sizes_that_differ]"),
    ],
    "multi_process/test_failures.py": [
        "test_hanging_worker[0-25]",
        "test_worker_that_stops_training_alone_within_an_epoch[stop-0]",
        "test_worker_that_stops_training_alone_within_an_epoch[stop between averages-1]",
    ],
    "pipeline/test_pipelines.py": [
        *("test_four_devices_equal_one_process[gpipe]", "test_four_workers_equal_one_process"),
        *("test_compressors_lose_little[bf16]", "test_compressors_lose_little[topk:0.2]"),
        "test_a_lost_worker_is_named_and_residuals_resume",
    ],
    "pipeline/test_training.py": [
        *("test_equals_plain_keras[masks]", "test_equals_plain_keras[nested]"),
        *("test_equals_plain_keras[shared]", "test_equals_plain_keras[losses_of_layers]"),
        *("test_equals_plain_keras[tied]", "test_masked_losses_are_divided_by_all_entries"),
        *("test_every_reduction_with_weights[gpipe-sum]", "*_see_the_batch[OwnLoss-mse]"),
        "test_every_reduction_with_weights[gpipe-sum_over_batch_size]",
    ],
    # Workers compile the first; one that attends, one of several layers and one of the other
    # schedule are left.
    "pipeline/test_compiled.py": [
        *(f"test_compiled_stages_equal*[{name}-1f1b]" for name in ("skips", "attention")),
        *("test_compiled_stages_equal*[nested-gpipe]", "test_compiled_*_workers_*[attention]"),
    ],
    "pipeline/test_recompute.py": [
        *(
            f"test_equals_plain_keras[{name}]"
            for name in ("shared", "losses_of_layers", "masks", "attention", "tied", "nested")
        ),
        *("test_state_and_seeds_are_used_once[stateful-pipedream]", "*[noisy-gpipe]"),
    ],
    "pipeline/test_pipedream.py": [
        *("*_of_its_staleness[recurrent]", "*_of_its_staleness[losses_of_layers]"),
        *("*_of_its_staleness[normalised]", "test_dropout_is_reproducible"),
    ],
    "pipeline/test_measure.py": [
        *("test_mixed_precision_and_masks_train", "test_memory_in_the_plan[gpipe-*"),
    ],
    "pipeline/test_memory.py": ["test_four_stages_train_where_one_process_has_no_room"],
    "pipeline/test_processes.py": [
        "test_variables_and_slots_are_on_the_stage_of_their_context",
        "test_a_hanging_stage_ends_the_job",
    ],
    # `make test-fast` and `make test-versions` run these.
    "smoke/test_every_strategy.py": [
        *("*[all_reduce]", "*[sync_parameter_server]", "*[pipeline]", "*[hybrid]"),
    ],
}


def mark(items, folder, whole):
    """Marks the tests that are extended.

    Args:
        items: Tests, as pytest has found them.
        folder: `tests`.
        whole: Whether all tests of each file are there, so that a pattern without one is an error.
    """
    for path, patterns in TESTS.items():
        own = [item for item in items if item.path == folder / path]
        for pattern in patterns:
            literal = pattern.replace("[", "[[]")
            found = [item for item in own if fnmatch.fnmatchcase(item.name, literal)]
            for item in found:
                item.add_marker("extended")
            if own and whole and not found:
                raise pytest.UsageError(f"No test is of extended.py's {path}::{pattern}")
