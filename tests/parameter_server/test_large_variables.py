"""Variables of more than TensorFlow can send at once, 2 GiB: cut, trained, saved and loaded."""

import os
import pathlib
import sys

import pytest

from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.parameter_server.extended import MOST_BYTES, offsets_of
from tests.support import jobs
from tests.support.tables import for_each

JOB = pathlib.Path(__file__).with_name("large_variable_job.py")
GIB = 1 << 30
NEEDED_GIB = 16


def largest(offsets, row_bytes):
    return max(end - first for first, end in zip(offsets, offsets[1:])) * row_bytes


@for_each(
    "shape, shards, keeps_whole, expected",
    [
        # 2.5 GB on one server, and on two by the partitioner.
        ((4_900_000, 128), 1, False, 3),
        ((4_900_000, 128), 2, False, 3),
        ((4_900_000, 128), 4, False, 4),
        # What a script wants whole stays so as long as it can be sent.
        ((4_000_000, 128), 1, True, 1),
        ((4_000_000, 128), 1, False, 2),
        ((4_900_000, 128), 1, True, 3),
        # The largest that is one, and the smallest that is not.
        ((1 << 21, 128), 1, False, 1),
        (((1 << 21) + 1, 128), 1, False, 2),
        ((5, 1 << 27), 1, False, 3),
        ((5, (1 << 28) + 1), 3, False, 5),
    ],
)
def test_no_shard_is_too_large(shape, shards, keeps_whole, expected):
    offsets = offsets_of(shape, "float32", shards, keeps_whole)
    assert len(offsets) == expected + 1
    assert offsets[0] == 0 and offsets[-1] == shape[0] and offsets == sorted(set(offsets))
    row_bytes = 4 * shape[1]
    limit = MOST_BYTES if keeps_whole else max(GIB, row_bytes)
    assert largest(offsets, row_bytes) <= limit < 2 * GIB


def test_shards_are_cut_as_tensorflow_does():
    assert offsets_of((10, 1 << 26), "float32", 4, True) == [0, 3, 6, 8, 10]


def test_a_row_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match=r"first axis.*Received: shape=\(2, 600000000\)"):
        offsets_of((2, 600_000_000), "float32", 1, False)


def available_gib():
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


@pytest.mark.skipif(
    not os.environ.get("KERAS_PSPLUS_LARGE_TESTS"),
    reason="takes minutes and 16 GiB: set KERAS_PSPLUS_LARGE_TESTS=1",
)
@pytest.mark.skipif(available_gib() < NEEDED_GIB, reason=f"needs {NEEDED_GIB} GiB of free memory")
def test_a_table_of_more_than_2_gb_on_one_server_is_saved_and_loaded(tmp_path):
    command = [sys.executable, str(JOB), str(tmp_path)]
    with LocalCluster(command, workers=1, chief=True, ps=1, env=jobs.environment()) as cluster:
        result = cluster.wait(540)
    # It takes long to end with that much memory: the others may not wait for it.
    assert result.exit_codes["chief-0"] == 0, result.tails()
    for line in ("saved weights", "loaded weights", "loaded checkpoint"):
        assert line in result.logs["chief-0"]
