import pytest
import tensorflow as tf

from keras_psplus.all_reduce.step import Step


class Fence:
    def __init__(self):
        self.left = 0

    def arrive(self):
        return tf.constant(0.0)

    def leave(self, total):
        self.left += 1


class Extended:
    """What a step asks of its strategy, for one replica of one."""

    _num_replicas_in_sync = 1

    def __init__(self, fence):
        self.fence = fence
        self.sums = []

    def rank_in_context(self):
        return 0

    def sum_over_replicas(self, tensors):
        self.sums.append(len(tensors))
        return list(tensors)


@pytest.mark.parametrize("tensors", [[], [tf.constant(2.0)]])
def test_replicas_meet_at_the_fence_once_and_again_only_after_a_push(tensors):
    extended = Extended(Fence())
    with Step(extended) as step:
        step.has_pushed = True
        assert [float(t) for t in step.synchronise(tensors=tensors)] == [float(t) for t in tensors]
        step.synchronise()
        assert extended.fence.left == 1
        step.has_pushed = True
        step.synchronise()
        step.synchronise()
    assert extended.fence.left == 2
    assert extended.sums == [len(tensors) + 1, 0, 1, 0]


def test_without_tables_nothing_is_added():
    extended = Extended(None)
    with Step(extended) as step:
        step.synchronise()
    assert extended.sums == [0]
