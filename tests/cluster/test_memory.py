"""Large blocks that are freed and taken again come without a page fault for each of their pages."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("page_faults.py")


@pytest.mark.parametrize(
    ("function", "mebibytes", "chosen", "is_kept"),
    [
        ("keep_freed_memory", 40, {}, True),
        ("keep_little_freed_memory", 40, {}, False),
        ("keep_little_freed_memory", 8, {}, True),
        # A choice of the user stays.
        ("keep_freed_memory", 40, {"MALLOC_MMAP_THRESHOLD_": "1000000"}, False),
        ("keep_freed_memory", 40, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=3"}, False),
    ],
)
def test_freed_blocks_are_kept(function, mebibytes, chosen, is_kept):
    kept = {k: v for k, v in os.environ.items() if "MALLOC_" not in k and k != "GLIBC_TUNABLES"}
    command = [sys.executable, SCRIPT, function, str(mebibytes)]
    said = subprocess.run(command, env=kept | chosen, stdout=subprocess.PIPE, text=True, check=True)
    told, faults = said.stdout.split()
    assert (told == "True") == (not chosen)
    assert float(faults) < 0.01 if is_kept else float(faults) > 0.5
