"""Files beside the package say what the Makefile and the package have."""

import pathlib
import re

import pytest
import yaml

from keras_psplus import versions

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_there_is(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        program, argument = command.split()[:2]
        assert program in ("make", "bash"), command
        assert argument in TARGETS if program == "make" else (ROOT / argument).is_file(), command
    # A job that hangs must not cost hours.
    assert all("timeout-minutes" in job for job in jobs.values())


def test_the_help_of_make_names_each_target():
    described = set(
        re.findall(r"^#   make ([a-z-]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    assert described == TARGETS - {"help"}


def test_files_name_this_version():
    version = versions.__version__.partition(".dev")[0]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"site_name: keras_psplus {version} " in (ROOT / "mkdocs.yml").read_text()
    assert f"This manual is of version {version}." in (ROOT / "docs/index.md").read_text()
    section = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    is_released = version == versions.__version__
    date = r"\d{4}-\d\d-\d\d" if is_released else "unreleased"
    assert re.fullmatch(rf"\[{re.escape(version)}\] - {date}", section)


def test_what_a_release_changes_is_read_in_two_minutes():
    section = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    assert len(section.split()) <= 500


def test_commits_are_checked_by_the_tools_of_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"].split()[0] for hook in config["repos"][0]["hooks"]]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert {pathlib.Path(hook).name for hook in hooks} == set(re.findall(r"\(BIN\)/(\w+)", lint))
