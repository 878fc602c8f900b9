"""States of BackupAndRestore that a kill, or a full disk, cuts short, or that are damaged."""

import collections
import contextlib
import json
import pathlib
import re
import subprocess

import pytest

from tests.faults import damage
from tests.support.jobs import run_script
from tests.support.tables import for_each

pytestmark = pytest.mark.processes
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
        return run(folder, *([disk] if disk else []))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same of a process with one replica, and what it makes of damaged files."""
    return run(tmp_path_factory.mktemp("alone"), "--alone")


def run(*args):
    by_kind = collections.defaultdict(list)
    for line in run_script(JOB, *args).splitlines():
        if line.startswith("["):
            kind, where, state = json.loads(line)
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
    assert_turns([state for _, state in found[cut_short]], before, after)


def test_one_replica_has_the_same_guarantees(alone):
    assert_turns([state for _, state in alone["alone"]], [1.0, 1], [2.0, 2])


def assert_turns(states, before, after):
    turn = states.index(after)
    # The last one is that of a start after no kill.
    assert turn > 0
    assert states == [before] * turn + [after] * (len(states) - turn)


@for_each("case", damage.CASES)
def test_a_damaged_state_is_named_or_an_older_one_is_used(alone, case):
    file = damage.CASES[case][0]
    error, state = dict(alone["damaged"])[case]
    assert state is None
    assert "is damaged or incomplete, and there is no older whole one. Put that file back" in error
    assert re.search(rf"Received: .*/{file} ", error), error
    # With `double_checkpoint`, training resumes from the state before, and says so.
    said, state = dict(alone["replaced"])[case]
    assert state == [1.0, 1], said
    assert "training resumes from the one before, at epoch 2. Received: " in said
    assert f"/{file} " in said
    assert dict(alone["after"])[case] == ["", [1.0, 1]]


def test_a_state_of_keras_is_used_unless_it_is_damaged(alone):
    assert alone["of Keras"] == [("whole", ["", [3.0, 3]])]
    for case, (file, _) in damage.OF_KERAS.items():
        error, state = dict(alone["damaged"])[case]
        assert state is None and re.search(rf"Received: .*/{file}\b", error), error


def test_a_full_disk_is_told_and_leaves_the_state_before(found):
    if not found["full"]:
        pytest.skip("this user may not mount a small disk to fill")
    ((error, state),) = found["full"]
    assert "state could not be written to" in error and "Make room on that disk" in error
    assert "Received: [Errno 28]" in error
    assert state == [1.0, 1]
    assert found["room"] == [(0, [3.0, 3])]
