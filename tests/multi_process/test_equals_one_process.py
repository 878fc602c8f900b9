"""Every way of training equals one process on the same global batches, on all workers alike.

Two workers of all-reduce run every case in `make test-all`. The other layouts run those that they
may treat in another way: replicas without rows, state, tables, losses and logs, steps of a script's
own.
"""

import pytest

from tests.multi_process.fit_cases import CASES, TOLERANCE, without_loss
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

# Under parameter servers, a batch's logs are those of the last step that has come back, or of none.
ONLY_ASYNCHRONOUS = {
    *("metrics_that_replace_or_have_several_results", "callbacks_between_the_steps"),
    *("random_predictions", "batches_of_known_size", "outputs_of_predict", "much_at_once"),
}
# By layout, the cases of `make test`: replicas without rows, state, and what takes a route of its
# own. Those of `tests/matrix` show that the names of Keras equal one process.
TESTED = {
    "ar3": "last_batch_of_one_row",
    "devices2": "convolutions_of_single_rows run_eagerly",
    "stages2": "last_batch_of_one_row",
    "async_sharded": "callbacks_between_the_steps masked_sequence_loss",
    "sync_sharded": "own_loss_with_an_empty_replica",
    "ar2": """
        ragged_and_sparse_rows gradient_accumulation_in_loop step_of_its_own_without_call
        mixed_precision_skips_overflow
    """,
}
# Those that `make test-rest` adds, each where it may go wrong; `ar2` has all the others.
MORE = {
    "ar3": "maps_of_own_rows",
    "ar2x2": "last_batch_of_one_row",
    "devices2": "gradient_accumulation_in_loop",
    "stages2": """
        dataset_of_unknown_length grain_dataset moving_average_after_skipped_steps much_at_once
    """,
    "pipelines4": "gradient_penalty several_inputs_and_outputs",
    "async_threads": """
        steps_per_execution py_dataset generator metrics random_predictions batches_of_known_size
    """,
    "async_sharded": """
        global_clipnorm several_steps_in_a_loop embeddings_of_several_widths outputs_of_predict
        metrics_that_replace_or_have_several_results
    """,
    "sync_threads": "perplexity_of_keras_hub mixed_precision_skips_overflow",
}
ELSEWHERE = " ".join([*TESTED.values(), *MORE.values()]).split()
MORE["ar2"] = " ".join(CASES.keys() - ONLY_ASYNCHRONOUS - set(ELSEWHERE))


def cells(layouts, layout):
    return [(layout, case) for case in sorted(layouts.get(layout, "").split())]


# Each cluster once; that of the last test, and of other modules, at the end.
CELLS = [
    cell
    for layout in sorted({*TESTED, *MORE})
    for cell in (*cells(TESTED, layout), *extended(*cells(MORE, layout)))
]


@pytest.mark.parametrize("layout, case", CELLS)
def test_equals_one_process(layout, case):
    found = equals_one_process(layout, CASES[case], TOLERANCE[case]).first
    if case == "mixed_precision_skips_overflow":
        # Also of accumulated gradients, an overflow halves the scale once.
        assert (found["scale"], found["iterations"]) == (2.0**7, 3)


# Every route that a compressed gradient can take.
@pytest.mark.parametrize(
    "case",
    extended("embeddings_of_several_widths", "run_eagerly"),
)
def test_two_workers_that_compress_without_loss(case):
    found = run("ar2", without_loss, name=case)
    assert_close(found.first, reference(CASES[case]), TOLERANCE[case])


def test_every_case_is_run_somewhere():
    run_somewhere = " ".join([*TESTED.values(), *MORE.values()]).split()
    assert set(run_somewhere) == set(CASES)
