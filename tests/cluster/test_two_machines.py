"""The page of two machines, followed on two hosts: its commands, and what its tables say of errors.

Both columns of the table are held against what is printed.
"""

import contextlib
import os
import pathlib
import re
import signal
import sys
import time

import keras
import pytest

from tests.cluster import two_hosts
from tests.docs import pages

PAGE = pages.ROOT / "docs" / "two_machines.md"
DOCTOR = "keras-psplus doctor --hosts 10.0.0.1,10.0.0.2"
RUN = "keras-psplus run --hosts 10.0.0.1,10.0.0.2 train.py"

pytestmark = [pytest.mark.extended, pytest.mark.processes]


@pytest.fixture(autouse=True)
def namespaces():
    if problem := two_hosts.why_not():
        pytest.skip(f"no two hosts here: {problem}")


def hosts(folder, has_script=True, **options):
    """Two hosts with the page's script, made in a folder."""
    (script,) = (block.text for block in pages.blocks(PAGE) if block.language == "python")
    made = two_hosts.TwoHosts(folder, **options)
    made.work.mkdir()
    made.work_there.mkdir()
    for path in (made.work, made.work_there)[: 1 + has_script]:
        (path / "train.py").write_text(script)
    return made


def rows(columns):
    """Texts in backquotes of the page's tables, by row and column."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| (`|\|)", line)]
    cells = [re.split(r" ?\| ", line[2:])[:columns] for line in lines]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in cells]


def row(text):
    """Outputs of `doctor` and `run` in the case whose row has a text."""
    (found,) = [row for row in rows(2)[1:] if any(text in key for cell in row for key in cell)]
    return found


def until(process, text, seconds=120):
    """Reads a process's lines until one has a text, which may have `...`; returns all."""
    said, deadline = "", time.monotonic() + seconds
    while not pages.shows(text, said):
        line = process.stdout.readline()
        assert line and time.monotonic() < deadline, said
        said += line.replace("10.77.0.", "10.0.0.")
    return said


def test_the_commands_train_one_model(tmp_path):
    blocks = [block for block in pages.blocks(PAGE) if block.language in ("shell", "bash")]
    lines = [line for block in blocks for line in block.text.splitlines()]
    wanted = [line for line in lines if re.match("ssh 10|scp|keras-psplus .*--hosts", line)]
    wanted = [line for line in wanted if "--dry_run" not in line]
    assert wanted[-2:] == [DOCTOR, RUN] and len(wanted) == 5, wanted
    with hosts(tmp_path, has_script=False) as machines:
        for line in wanted:
            code, out = machines.run(line)
            assert code == 0, (line, out)
            assert line != DOCTOR or "No problem found." in out, out
        assert len(re.findall(r"\[worker-0@10.0.0.1\] .* loss: [\d.]+$", out, re.M)) == 3, out
        folders = machines.work, machines.work_there
        assert [(folder / "model.keras").is_file() for folder in folders] == [True, False]
        machines.set_rate(2e7)
        code, out = machines.run(DOCTOR)
    assert code == 0
    ((text,), _) = row("gradients of a million")
    assert pages.shows(text, out), out


def overlay_of(name, folder):
    """Folders that lie over paths of the second host, in the case of a name."""
    if name not in ("Python", "library", "clock", "versions"):
        return {}
    (there := folder / "there").mkdir()
    if name == "Python":
        return {pathlib.Path(sys.prefix).resolve(): there}
    if name == "library":
        # The checkout, and what an editable installation has of it.
        found, packages = (
            {pages.ROOT / "keras_psplus": there},
            pathlib.Path(keras.__file__).parents[1],
        )
        (folder / "nothing").touch()
        found |= dict.fromkeys(packages.glob("keras_psplus-*.dist-info"), there)
        return found | dict.fromkeys(packages.glob("__editable__*psplus*.pth"), folder / "nothing")
    if name == "clock":
        ahead = "import time\nnow = time.time\ntime.time = lambda: now() + 90\n"
        (there / "sitecustomize.py").write_text(ahead)
        return {folder / "site": there}
    # Another Keras, as far as the version tells.
    source = pathlib.Path(keras.__file__).parent
    (metadata,) = source.parent.glob(f"keras-{keras.__version__}.dist-info/METADATA")
    found = {}
    for path in (source / "src" / "version.py", metadata):
        found[path] = there / path.name
        found[path].write_text(path.read_text().replace(keras.__version__, "3.13.9"))
    return found


CASES = {
    "key": "Permission denied",
    "Python": "exit code 127",
    "library": "has no keras-psplus",
    "script": "can't open file",
    "versions": "have different versions",
    "firewall": "a firewall drops",
    "port": "Address already in use",
    "clock": "the clock of",
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_wrong(tmp_path, name):
    said, shown = row(CASES[name])
    options = {"overlays": overlay_of(name, tmp_path)}
    options |= {"has_key": name != "key", "has_script": name != "script"}
    with hosts(tmp_path, **options) as machines:
        if name == "firewall":
            machines.close_port(2222)
        if name == "port":
            holder = machines.start("exec python -m http.server 2222", rank=1)
            time.sleep(1)
        began = time.monotonic()
        code, out = machines.run(DOCTOR)
        assert time.monotonic() - began < 12, out
        assert all(pages.shows(text, out) for text in said), out
        assert bool(code) == bool(said), out
        if name == "port":
            assert holder.poll() is None
        if not shown:
            return
        process = machines.start(RUN)
        out = until(process, shown[0])
        if name == "firewall":
            os.killpg(process.pid, signal.SIGINT)  # As by Ctrl-C, before the 300 s are over.
        out += process.communicate(timeout=60)[0].replace("10.77.0.", "10.0.0.")
        assert process.returncode, out
        assert all(pages.shows(text, out) for text in shown), out


@contextlib.contextmanager
def pasted(machines, picks):
    """Starts printed lines, by rank and number of the call that has printed them."""
    (line,) = (
        line
        for block in pages.blocks(PAGE)
        for line in block.text.splitlines()
        if block.language == "shell" and "--dry_run" in line
    )
    printed = [machines.run(line)[1].splitlines()[1::2] for _ in range(2)]
    yield [machines.start(printed[call][task], rank) for rank, task, call in picks]


def test_pasted_lines_train_one_model(tmp_path):
    with hosts(tmp_path) as machines, pasted(machines, [(0, 0, 0), (1, 1, 0)]) as tasks:
        said = [task.communicate(timeout=200)[0] for task in tasks]
        folders = machines.work, machines.work_there
        assert [task.returncode for task in tasks] == [0, 0], said
        losses = [re.findall(r"loss: (\S+)", text) for text in said]
        assert losses[0] == losses[1] and len(losses[0]) == 3, said
        assert [(folder / "model.keras").is_file() for folder in folders] == [True, False]


def test_lines_that_are_pasted_wrongly(tmp_path):
    [[elsewhere], _], [[secret], _] = rows(2)[-2:]
    # The other machine's line; and lines of two calls.
    with hosts(tmp_path) as machines:
        with pasted(machines, [(0, 1, 0)]) as (task,):
            assert elsewhere in task.communicate(timeout=100)[0]
        with pasted(machines, [(0, 0, 0), (1, 1, 1)]) as (task, _):
            assert "waiting for worker-1" in until(task, secret)
