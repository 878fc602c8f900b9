"""A state of BackupAndRestore that a kill, or a full disk, cuts short: the one before stays."""

import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

JOB = pathlib.Path(__file__).with_name("backup_job.py")


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 256 KiB on a folder; None if this user may not make one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    except FileNotFoundError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By what was cut short: pairs of the operation's number, or the error, and what was found."""
    folder = tmp_path_factory.mktemp("backup")
    with small_disk(folder / "small") as disk:
        done = subprocess.run(
            [sys.executable, str(JOB), str(folder), *([str(disk)] if disk else [])],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    by_kind = collections.defaultdict(list)
    for kind, where, state in map(json.loads, done.stdout.splitlines()):
        by_kind[kind].append((where, state))
    return by_kind


@pytest.mark.parametrize(
    ("cut_short", "before", "after"),
    [
        ("first", [0.0, 0], [1.0, 1]),
        ("next", [1.0, 1], [2.0, 2]),
        ("double", [2.0, 2], [3.0, 3]),
        ("end", [2.0, 2], [0.0, 0]),
    ],
)
def test_weights_and_epoch_are_of_one_state_wherever_a_kill_comes(found, cut_short, before, after):
    states = [state for _, state in found[cut_short]]
    turn = states.index(after)
    assert turn > 0 and len(states) > turn + 1
    assert states == [before] * turn + [after] * (len(states) - turn)


def test_a_full_disk_is_told_and_leaves_the_state_before(found):
    if not found["full"]:
        pytest.skip("this user may not mount a small disk to fill")
    ((error, state),) = found["full"]
    assert "state could not be written to" in error and "Make room on that disk" in error
    assert "Received: [Errno 28]" in error
    assert state == [1.0, 1]
    assert found["room"] == [(0, [3.0, 3])]
