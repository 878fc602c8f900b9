"""Gradients that count in a step, what its shares change, and copies of what it has made."""

import types

import numpy as np
import tensorflow as tf

from keras_psplus.parameter_server.context import StepAttempts
from keras_psplus.parameter_server.step_functions import ClosureTotals
from keras_psplus.parameter_server.sync_steps import StepUpdates
from keras_psplus.parameter_server.worker_function import ClosureVariable, writes


def test_a_share_that_is_computed_again_voids_its_attempt():
    attempts = StepAttempts(backup_workers=0)
    first = attempts.begin(2, 2)
    assert first.admit(0) and first.admit(1)
    first.finish(0, "vector")
    # The worker of the other one was lost, after it had added a part.
    assert not first.admit(1) and first.is_void and first.is_over
    assert attempts.begin(2, 2).stamp > first.stamp


def test_shares_count_by_their_rows():
    kinds = {"total": [10.0], "state": [1.0], "seed": [5, 0]}
    variables = [
        ClosureVariable(tf.Variable(value, dtype="int64" if kind == "seed" else None), kind)
        for kind, value in kinds.items()
    ]
    totals = ClosureTotals(variables)
    seeds = [totals.next_for(share)[2] for share in range(3)]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    # One share has three of four rows; both have drawn twice.
    changes = np.array([[3.0, 4.0, 0.0, 2.0], [1.0, 8.0, 0.0, 2.0]])
    totals.add(changes, np.array([0.75, 0.25]), 1, [])
    totals.steps += 1
    np.testing.assert_array_equal(totals.next, [14.0, 6.0, 5.0, 2.0])
    # What a step replaces is no sum.
    totals.add(changes, np.array([0.75, 0.25]), 1, variables[:1])
    np.testing.assert_array_equal(totals.values, [16.5, 11.0, 5.0, 0.0])


def test_copies_are_of_the_weights_until_something_is_written():
    states, queue = types.SimpleNamespace(losses=0), types.SimpleNamespace(lost=[])
    context = types.SimpleNamespace(
        extended=types.SimpleNamespace(worker_states=states),
        scheduler=types.SimpleNamespace(queue=queue),
    )
    updates = StepUpdates(context, None)
    done = types.SimpleNamespace(is_early=True, readers=[0], finish=lambda lost: {0})

    def write():
        writes.count += 1

    def lose():
        states.losses += 1

    for change in (write, lose):
        updates.finish(done, 1, 1.0)
        assert updates.has_copies(0) and not updates.has_copies(1)
        change()
        assert not updates.has_copies(0)
