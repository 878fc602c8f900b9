"""Large blocks that are freed and taken again come without a page fault for each of their pages."""

import os
import resource
import subprocess
import sys

import pytest

PAGE = resource.getpagesize()


def faults_of_a_block(mebibytes):
    """The least page faults of some blocks, each of which is freed before the next.

    Another thread may take a part of what was freed, so that the next block does not fit there.
    """
    found = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytes(range(1, 256)) * ((mebibytes << 20) // 255)  # written to the end
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[1:])


def measure(function="keep_freed_memory", mebibytes=40, **environment):
    """What was told, and faults as parts of a block's pages, in a process of its own."""
    code = (
        "from keras_psplus.cluster.process import memory\n"
        "from tests.cluster.test_memory import faults_of_a_block\n"
        f"memory.keep_freed_memory()\nprint(memory.{function}(), faults_of_a_block({mebibytes}))\n"
    )
    kept = {k: v for k, v in os.environ.items() if "MALLOC_" not in k and k != "GLIBC_TUNABLES"}
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    ).stdout
    told, faults = output.split()[-2:]
    return told == "True", int(faults) / ((mebibytes << 20) // PAGE)


def test_freed_blocks_are_kept():
    told, faults = measure()
    assert told
    assert faults < 0.01


def test_a_little_of_freed_blocks_is_kept():
    told, faults = measure("keep_little_freed_memory")
    assert told
    assert faults > 0.5
    told, faults = measure("keep_little_freed_memory", mebibytes=8)
    assert faults < 0.01


@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_MMAP_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=3"}],
)
def test_choice_of_the_user_stays(setting):
    told, faults = measure(**setting)
    assert not told
    assert faults > 0.5
