import pytest

from keras_psplus.parameter_server.extended import gpus_per_worker


def gpus(*counts):
    return [
        f"/job:worker/replica:0/task:{task}/device:GPU:{i}"
        for task, count in enumerate(counts)
        for i in range(count)
    ]


def test_one_gpu_or_none_on_each_worker():
    assert gpus_per_worker([], range(3)) == 0
    assert gpus_per_worker(gpus(1, 1), range(2)) == 1
    # The others' are of no concern.
    assert gpus_per_worker(["/job:chief/replica:0/task:0/device:GPU:0", *gpus(1, 1)], range(2)) == 1
    assert gpus_per_worker(["/job:ps/replica:0/task:0/device:GPU:0"], range(2)) == 0


@pytest.mark.parametrize("counts", [(1, 0), (0, 1), (2, 2), (1, 2)])
def test_unequal_or_several_gpus_are_refused(counts):
    told = f"Received: GPUs of worker-0: {counts[0]}, worker-1: {counts[1]}"
    with pytest.raises(ValueError, match=told):
        gpus_per_worker(gpus(*counts), range(2))
