"""The Python blocks of README.md and docs/*.md do what they say, as far as they end with 0."""

import ast
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests.docs import pages
from tests.selection import cases
from tests.support.tables import for_each

SCRIPT = pathlib.Path(__file__).with_name("run_programs.py")
# What the programs of these show is tested elsewhere, in less time.
DEAR = (
    *("docs/architecture.md", "docs/backups.md", "docs/data.md", "docs/dynamic_tables.md"),
    *("docs/evaluator.md", "docs/hybrid.md", "docs/keras_libraries.md", "docs/monitoring.md"),
    *("docs/pipeline.md", "docs/scripts.md", "docs/streams.md"),
)
PROGRAMS = [
    pytest.param(program.name, marks=[pytest.mark.extended] * program.name.startswith(DEAR))
    for program in pages.programs()
]
TIMEOUT = 500


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """What became of the programs of the wanted pages, all of which one process has run."""
    names = cases(request, "test_runs", argument="name")
    wanted = sorted({name.partition(":")[0] for name in names})
    folder = tmp_path_factory.mktemp("programs")
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *wanted],
            env={**env, "CUDA_VISIBLE_DEVICES": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT)
        finally:
            # With the tasks that it has forked, if it did not come to its end.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, log.read_text(errors="replace")[-6000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.processes
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs(results, name):
    program = results[name]
    logs = [
        f"=== {task} ended with {code}:\n"
        + (pathlib.Path(program["directory"]) / f"{task}.log").read_text(errors="replace")[-6000:]
        for task, code in program["exit_codes"].items()
    ]
    assert not any(program["exit_codes"].values()), "\n".join(logs)


@for_each(
    "block",
    [block for block in pages.all_blocks() if block.language == "python"],
    ids=lambda block: block.name,
)
def test_leaves_nothing_out(block):
    holes = [
        block.line + node.lineno
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Constant) and node.value is ...
    ]
    assert not holes, f"`...` instead of code in lines {holes}"


@for_each("page", pages.PAGES)
def test_a_block_runs_as_it_is_copied(page):
    """It reads no name that it does not bind, or the page says that it comes `then`."""
    lines, above, end = page.read_text().splitlines(), set(), 0
    for block in pages.blocks(page):
        if block.language == "python" and not block.hidden:
            bound, missing = pages.names(block)
            text = " ".join(lines[end : block.line])
            if missing and re.search(r"\bthen\b", text, re.IGNORECASE):
                missing -= above
            assert not missing, f"{block.name} needs {sorted(missing)}"
            above |= bound
            end = block.line + len(block.text.splitlines())
