"""Tests that `make test` leaves out and `make test-all` runs: more of what others show.

Each says on one more combination, optimizer, kind of dataset or fault what a test of `make test`
says of the path that they share. A path, a refusal or an error of its own is never one of them.
pytest runs them too, unless it is asked for `-m "not extended"`.
"""

import fnmatch

import pytest

# By file, patterns of the tests' names. In a name, brackets are as they are.
TESTS = {
    "sharding/test_shares.py": [
        "test_job_goes_on_from_its_backup_*[2]",
        # Element by element or whole on one worker, as others that are left.
        *(f"test_two_*[{name}]" for name in ("rmsprop", "adamax", "adadelta", "ftrl", "lion")),
        *("test_two_*[adagrad]", "test_two_*[lamb]", "test_two_*[embedding/adagrad]"),
        "test_two_*[adafactor]",
        *("test_two_*[sgd]", "test_two_*[nadam]", "test_two_*[adam_clipvalue]"),
        "test_two_*[embedding/momentum_clipnorm]",
        *(f"test_three_*[{name}]" for name in ("adafactor", "adamw", "embedding/adamw")),
    ],
    "sharding/test_full_shares.py": [
        "test_job_goes_on_from_its_backup_*[3]",
        # `mixed` has a scale of the loss as well.
        "test_two_workers_equal_one_process[loss_scale]",
        # Layers, and optimizers whose slots are as those of test_shares.py's.
        *("test_two_*[transformer]", "test_two_*[recurrent]"),
        *("test_two_*[schedule_free]", "test_two_*[counting]"),
        *(f"test_three_*[{name}]" for name in ("convolutional", "adamw", "tied", "muon")),
        *(f"test_compiled_units_*[{name}]" for name in ("encoder", "tied", "mixed")),
    ],
    "sharding/test_options.py": [
        "test_accumulated_updates_equal_those_of_one_process[all-*",
        *(f"test_accumulated_*[optimizer-*/{name}]" for name in ("average", "loss_scale", "adamw")),
        # What goes between groups has both compressors as well.
        "test_compressed_training_learns_as_much[optimizer]",
        "test_groups_of_two_of_four_workers_equal_one_process[all]",
        *("test_parts_along_a_topology_equal_one_process[all-*", "*[optimizer-groups1]"),
        "test_what_goes_between_groups_is_compressed[groups1]",
    ],
    "parameter_server/test_compression.py": [
        f"test_{name}"
        for name in (
            *("whole_variables[topk_warmup_as_by_hand]", "sharded_variables[topk_corrected*]"),
            *("whole_variables[powersgd_late_as_by_hand]", "sharded_variables[compressed*]"),
            *("whole_variables[rounded_lookups_as_by_hand]", "whole_variables[constraints*]"),
            *("whole_variables[bytes_that_differ*]", "whole_variables[without_communication*]"),
            *("whole_variables[randomk_as_by_hand]", "whole_variables[skipped_steps*]"),
            *("whole_variables[several_steps_of*]", "whole_variables[backup_and_restore*]"),
        )
    ],
    "parameter_server/test_updates.py": [
        *("*[own_step]", "*[loss_scale]"),
        "test_resumed_training_is_as_if_never_interrupted[accumulate]",
        *("*_on_larger_batches[flush]", "test_steps_alone_*[embedding]"),
    ],
    "parameter_server/test_sync_compression.py": [
        *("*_is_averaged[bf16]", "*_is_averaged[topk_corrected]", "*_is_averaged[own]"),
    ],
    "parameter_server/test_sync_overlap.py": [
        f"test_two_workers_equal_one_process[{name}]"
        for name in (
            *("regularisers_and_constraint", "mixed_precision_skips_overflow", "much_at_once"),
            *("gradient_accumulation_in_loop", "last_batch_of_one_row"),
        )
    ],
    "parameter_server/test_callbacks.py": [
        f"test_behaviour[{name}]"
        for name in (
            *("learning_rates", "not_a_number_ends_training", "repeated_dataset"),
            *("infinite_generator", "history_is_of_all_workers", "csv_log_is_the_history"),
            "weights_of_classes_and_samples",
        )
    ],
    "parameter_server/test_elastic.py": ["test_a_second_srun_joins"],
    "parameter_server/test_placement.py": ["test_training_with_cut_variables_in_processes"],
    "tensor_parallel/test_updates.py": ["*[optimizers]", "*[flush]", "*[loss_scale]"],
    "parameter_server/test_dynamic.py": [
        f"test_synchronous_training_equals_one_process[{name}]"
        for name in ("plain", "filtered", "keras_rs")
    ],
    "tensor_parallel/test_more_cases.py": ["*"],
    "tensor_parallel/test_model_parallel.py": [
        *("*_batches[mlp/adamw]", "*_batches[own_step]"),
        # Its other layers compiled, which leaves those that are cut as they are.
        "test_two_workers_equal_one_process[gpt2/sgd]",
        # Six workers; its sums are those of all-reduce's topologies.
        "test_groups_of_rows_equal_one_process",
    ],
    "parameter_server/test_jobs.py": [
        "test_steps_that_overlap_go_on_when_each_worker_is_killed",
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
