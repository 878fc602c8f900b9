"""The commands that README.md and docs/*.md show exist, and take the arguments shown."""

import ast
import importlib.util
import json
import pathlib
import re
import shlex
import tomllib

import pytest

from keras_psplus.cli import main
from keras_psplus.cluster.config import read_task_config
from tests.docs import pages
from tests.support.tables import for_each

# What is behind a fence says how the block is checked; see tests/README.md.
LANGUAGES = {
    *("python", "program", "shell", "bash", "yaml", "json", "text"),
    *("mermaid", "file"),
}
BLOCKS = pages.all_blocks()
PATHS = "benchmarks|docs|examples|keras_psplus|tests"
COMMANDS = ("keras-psplus ", "make ", "pip install ", "python ")


def of(language):
    """Has a test look at all blocks of a language."""
    chosen = [block for block in BLOCKS if block.language == language]
    return for_each("block", chosen, ids=lambda block: block.name)


@pytest.fixture(autouse=True)
def checkout(tmp_path, monkeypatch):
    """A folder as the reader has it: the checkout's, with a `train.py` of the reader's own."""
    for name in ("examples", "benchmarks", "tests", "pyproject.toml", "Makefile"):
        (tmp_path / name).symlink_to(pages.ROOT / name)
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)


def commands(text):
    """Yields each command of a shell's text as a list of words."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue  # within quotes
        pending = ""
        if words:
            yield words
    assert not pending, f"a quote is not closed in {pending!r}"


def check(words, monkeypatch):
    """Checks one command."""
    variables = []
    while re.match(r"\w+=", words[0]):
        variables.append(words.pop(0).split("=", 1))
    with monkeypatch.context() as environment:
        for name, value in variables:
            environment.setenv(name, value)
        if "TF_CONFIG" in dict(variables):
            assert read_task_config() is not None
        kinds = {
            "keras-psplus": check_launcher,
            "python": check_script,
            "make": check_target,
            "pip": check_extra,
        }
        while words[0] in ("sudo", "taskset"):
            words = words[3:] if words[0] == "taskset" else words[1:]
        assert words[0] in kinds, (
            f"An indented block, and one of the language shell, holds commands that begin with "
            f"{', '.join(kinds)}. Fence others as python, text, ... Received: {words}"
        )
        kinds[words[0]](words[1:])


def check_launcher(words):
    """Parses a line of the launcher's by its own parser; has `run` print what it would start."""
    command, *arguments = words
    module = importlib.import_module(f"keras_psplus.cli.{command.replace('-', '_')}")
    if command == "export":
        assert main.main(["export", *arguments]) == 0
        return
    if command == "bench":
        return check_options(re.search(r"benchmarks/\w+\.py", module._USAGE)[0], arguments)
    rest = module._parser().read(arguments).command
    if command in ("plan", "exec"):
        return check_options(rest[0], rest[1:])
    if command != "run":
        assert len(rest) == (command == "add-worker")
        return
    assert main.main(["run", "--dry_run", *arguments]) == 0, words
    if "--list" in arguments:
        return  # names no script
    check_options(rest[0], rest[1:])
    if rest[0] == "train.py" and "--hosts" not in arguments:
        assert main.main(words) == 0, words


def check_script(words):
    """A script of the checkout takes the options shown; a module of it is there."""
    if words[0] == "-m":
        return check_module(words[1])
    check_options(words[0], words[1:])


def check_module(name):
    assert importlib.util.find_spec(name), f"no module {name}"


def check_options(script, words):
    assert pathlib.Path(script).is_file(), f"no script {script}"
    if script == "train.py":
        return  # the reader's own
    unknown = {word for word in words if word.startswith("--")} - {"--help", *options(script)}
    assert not unknown, f"{script} does not take {unknown}"


def options(script):
    """Options that a script gives to argparse, as its source has them."""
    calls = [
        node
        for node in ast.walk(ast.parse(pathlib.Path(script).read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    return {argument.value for call in calls for argument in call.args}


def check_target(words):
    targets = re.findall(r"^([\w-]+):", pathlib.Path("Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets), words


def check_extra(words):
    assert words[0] == "install", words
    extras = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    for word in words[1:]:
        if found := re.fullmatch(r"(?:\.|keras-psplus)\[(\w+)\]", word):
            assert found[1] in extras["optional-dependencies"], word


@for_each("block", BLOCKS, ids=lambda block: block.name)
def test_language_is_one_that_is_checked(block):
    assert block.language in LANGUAGES, f"give one of {sorted(LANGUAGES)} behind the fence"


@of("shell")
def test_commands(block, monkeypatch):
    if block.page == pages.TUTORIAL:
        return  # test_tutorial.py runs them
    for words in commands(without_synopsis(block.text)):
        check(words, monkeypatch)


@for_each("page", pages.PAGES)
def test_commands_and_paths_in_text(page, monkeypatch):
    for token in pages.inline(page, "code_inline"):
        if token.content.startswith(COMMANDS) and "..." not in token.content:
            for words in commands(without_synopsis(token.content)):
                if words[:2] == ["keras-psplus", words[-1]]:
                    # A command's name.
                    importlib.import_module(f"keras_psplus.cli.{words[-1].replace('-', '_')}")
                elif words != ["python", "-m", "keras_psplus"]:
                    check(words, monkeypatch)
        if re.fullmatch(rf"(?:{PATHS})/(?!\.\.\.)[\w/.]*", token.content):
            assert (pages.ROOT / token.content).exists(), token.content


def without_synopsis(text):
    """What stands in brackets with a space is not meant to be typed."""
    return re.sub(r"\[[^\]]* [^\]]*\]", "", text) if "TF_CONFIG" not in text else text


def test_doctor_finds_nothing_wrong(capsys):
    assert main.main(["doctor", "--nodevices"]) == 0, capsys.readouterr().out


@of("json")
def test_json_is_a_configuration_of_a_task(block):
    assert read_task_config({"TF_CONFIG": json.dumps(json.loads(block.text))}) is not None


@of("mermaid")
def test_drawings_have_a_kind_and_closed_brackets(block):
    kind = block.text.split(maxsplit=1)[0]
    assert kind in {"flowchart", "sequenceDiagram", "stateDiagram-v2", "gantt"}, kind
    # What is within quotes may have any character.
    rest = re.sub(r'"[^"\n]*"', "", block.text)
    assert '"' not in rest, "a quote is not closed"
    for opening, closing in ("[]", "()", "{}"):
        assert rest.count(opening) == rest.count(closing), (opening, closing)
