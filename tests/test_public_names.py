"""Public names, arguments and flags."""

import inspect
import re

import pytest

import keras_psplus as psp
from keras_psplus import catalogue
from keras_psplus.cli import export, run, serve
from keras_psplus.cli.flags import UsageError
from tests import interface

STRATEGIES = [getattr(psp, name) for name in psp.__all__ if name.endswith("Strategy")]


def test_what_is_public_changes_with_a_line_in_the_changelog():
    """After a release, `python -m tests.interface` writes interface.txt again."""
    changed = interface.changes(interface.FILE.read_text().splitlines(), interface.lines())
    changelog = (interface.ROOT / "CHANGELOG.md").read_text()
    assert not interface.unnamed(changed, changelog)


def test_changes_are_found_and_looked_for():
    flag = "keras-psplus run --ps"
    before = "psp.a(x, y=1)|psp.b|psp.b.c|psp.d(x, y)".split("|") + [f"{flag}(default=0)"]
    after = "psp.a(x, y=2, *, z=0)|psp.b|psp.d(y, x)|psp.f|psp.f.g".split("|")
    after += [f"{flag}(default=1)"]
    changed = interface.changes(before, after)
    assert changed == {
        **{"y": ["psp.a"], "z": ["psp.a"], "c": ["psp.b.c"], "d": ["psp.d"], "f": ["psp.f"]},
        "--ps": [flag],
    }
    text = "# Changelog\n\n## [2]\n\n- `a(y=2)`, `b.c`, z.\n- `f`, `run --ps`\n\n## [1]\n\n- `d`\n"
    assert interface.unnamed(changed, text) == {"z": ["psp.a"], "d": ["psp.d"]}


def test_the_manual_lists_what_is_public():
    page = (interface.ROOT / "docs/stability.md").read_text()
    code = set(re.findall(r"`([^`]+)`", page))
    assert not {name.rpartition(".")[2] for name in interface.names()} - code
    for command, actions in interface.flags().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{command}` |"))
        assert re.findall(r"`--(\w+)`", row) == sorted(action.dest for action in actions)
    number = sum(map(len, interface.flags().values()))
    assert f"These are {len(interface.names())} names and {number} flags." in page


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_timeouts_have_the_same_names(kind):
    parameters = inspect.signature(kind.__init__).parameters
    assert {"startup_timeout", "heartbeat_timeout", "stall_warning"} <= set(parameters)


def test_one_default_of_schedule():
    assert inspect.signature(psp.PipelineStrategy.__init__).parameters["schedule"].default == "1f1b"
    assert "schedule" not in catalogue.ENTRIES["pipeline"].arguments


@pytest.mark.parametrize(
    ("command", "words", "found"),
    [
        (run, ["--max-restarts=2"], ("max_restarts", 2)),
        (run, ["--max-restarts", "2"], ("max_restarts", 2)),
        (run, ["--max_restarts", "2"], ("max_restarts", 2)),
        (run, ["--log-dir", "there"], ("log_dir", "there")),
        (run, ["--nochief"], ("chief", False)),
        (run, ["--no-chief"], ("chief", False)),
        (run, ["--no_chief"], ("chief", False)),
        (run, ["--nodry-run"], ("dry_run", False)),
        (run, ["--no-dry-run"], ("dry_run", False)),
        (run, ["--chief=false"], ("chief", False)),
        (run, ["--nochief", "--chief=True"], ("chief", True)),
        (run, ["--dry-run=1"], ("dry_run", True)),
        (run, ["--hosts=a, b"], ("hosts", ["a", "b"])),
        (export, ["--max-restarts=2"], ("max_restarts", 2)),
        (serve, ["--startup-timeout=2"], ("startup_timeout", 2)),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_flags_have_dashes_or_underscores(command, words, found):
    options = command._parser().read(words)
    assert options.command == [] and getattr(options, found[0]) == found[1]
    assert "--max-restarts, or underscores" in command._parser().format_help()


@pytest.mark.parametrize(
    "behind",
    [["--help"], ["-h", "--ps=9"], ["a b", "--", "-x", "--workers"], ["--nochief", "--unknown"]],
    ids=" ".join,
)
def test_what_is_behind_the_script_is_the_scripts(behind):
    for dashes in ([], ["--"]):
        options = run._parser().read(["--ps", "1", "--chief", *dashes, "train.py", *behind])
        assert options.command == ["train.py", *behind]
        assert (options.ps, options.chief, options.workers) == (1, True, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--work=2"], "no such flag. Did you mean: .* Received: --work=2"),
        (
            ["--workrs", "2", "train.py"],
            "no such flag. Did you mean: --workers\\? Received: --workrs",
        ),
        (["--ps=", "train.py"], "--ps needs a value. Received: --ps=''"),
        (["--ps=1.5"], "--ps must be a whole number. Received: --ps=1.5"),
        (["--timeout=-inf"], "--timeout must be a finite number. Received: --timeout=-inf"),
        (["--grace", "-1"], "--grace must be at least 0. Received: --grace=-1"),
        (["--restart=both"], "--restart: invalid choice: 'both'.*Received: --restart=both"),
        (["--warm=maybe"], "'maybe'. Received: --warm=maybe"),
        (["--log_dir"], "--log-dir: expected one argument. Received: --log_dir"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_wrong_flags(words, message):
    with pytest.raises(UsageError, match=message):
        run._parser().read(words)
