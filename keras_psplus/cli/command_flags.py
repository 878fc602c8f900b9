"""Flags of `keras-psplus` commands: parsing, and checks before anything is started."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from typing import Any

from absl import flags

from keras_psplus import catalogue, specs
from keras_psplus.catalogue import Entry
from keras_psplus.cluster.console import NoiseFilter
from keras_psplus.cluster.launcher.task_ends import ClusterResult
from keras_psplus.cluster.monitor.json_log import JsonLog
from keras_psplus.cluster.monitor.trace import STEPS as TRACE_STEPS

# Flags before the first other argument, everything from there on untouched.


class UsageError(Exception):
    """The command line cannot be used; the message says what would do."""


def parse(flag_values: flags.FlagValues, argv: list[str]) -> list[str]:
    """Parses the flags at the start of `argv`.

    Returns:
        The arguments after the flags: the script and what belongs to it.

    Raises:
        UsageError: If a flag is unknown, or has a wrong value or none.
    """
    own, rest = _split(flag_values, argv)
    try:
        flag_values(["keras-psplus", *own])
    except flags.Error as error:
        raise UsageError(f"{error}. Received: {shlex.join(own)}") from None
    for name in flag_values:
        value = flag_values[name].value
        if flag_values[name].present and value in ("", []):
            # As of a variable of the shell that is not set.
            raise UsageError(f"--{name} needs a value. Received: --{name}=''")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} must be a finite number. Received: --{name}={value}")
    return rest


def check_script(command: list[str]) -> None:
    """Raises `UsageError` if a command does not begin with a script that is there."""
    if not command:
        raise UsageError("name the script to run, after the flags")
    if not pathlib.Path(command[0]).is_file():
        raise UsageError(f"there is no script {command[0]!r}")


def remarks(flag_values: flags.FlagValues, command: list[str]) -> list[str]:
    """Warnings about probable mistakes: flags behind the script, another backend of Keras.

    Args:
        command: The script, which exists, and its arguments.
    """
    lines = []
    script = pathlib.Path(command[0]).read_text(errors="replace")
    behind = [word.partition("=")[0] for word in command[1:] if word.startswith("--")]
    names = {_name_of(flag_values, word.lstrip("-")) for word in behind}
    # A script that has a flag of this name is meant by it.
    ours = sorted(name for name in names if _is_flag(flag_values, name) and name not in script)
    if ours:
        listed = ", ".join(f"--{name}" for name in ours)
        lines.append(
            f"{listed}: behind the script, and so passed to it; flags of keras-psplus go before it"
        )
    backend = os.environ.get("KERAS_BACKEND", "")
    if backend not in ("", "tensorflow") and "KERAS_BACKEND" not in script:
        lines.append(
            f"KERAS_BACKEND={backend}: the strategies need Keras's TensorFlow backend; unset it"
        )
    return lines


def _name_of(flag_values: flags.FlagValues, word: str) -> str:
    """The name of a flag that may be written with dashes: --dry-run, --no-chief."""
    name = word.replace("-", "_")
    positive = name.removeprefix("no_")
    is_negated = name != positive and name not in flag_values and positive in flag_values
    return f"no{positive}" if is_negated and flag_values[positive].boolean else name


def _is_flag(flag_values: flags.FlagValues, name: str) -> bool:
    return name in flag_values or name.removeprefix("no") in flag_values


def shows_help(usage: str, flag_values: flags.FlagValues, argv: list[str]) -> bool:
    """Prints a command's help, and returns True, if its own arguments ask for it."""
    own, rest = _split(flag_values, argv)
    asks = bool({"-h", "--help"} & {*own, *rest[:1]})
    if asks:
        print(help_text(usage, flag_values))
    return asks


def help_text(usage: str, flag_values: flags.FlagValues) -> str:
    """Returns a command's help: its usage and its flags with their defaults."""
    lines = [usage.strip(), "", "flags (with dashes, as --max-restarts, or underscores):"]
    for name in sorted(flag_values):
        flag = flag_values[name]
        default = "" if flag.default is None else f" (default: {flag.default})"
        shown = f"--[no]{name}" if flag.boolean else f"--{name}"
        indent = " " * 20
        text = textwrap.fill(
            flag.help + default, 98, initial_indent=indent, subsequent_indent=indent
        )
        lines.append(f"  {shown:<18}{text[len(indent) :]}")
    return "\n".join(lines)


def complain(command: str, error: Exception) -> int:
    """Prints a usage error; returns the exit code for it."""
    print(
        f"keras-psplus {command}: {error}\nkeras-psplus {command} --help shows the flags.",
        file=sys.stderr,
    )
    return 2


def _split(flag_values: flags.FlagValues, argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits `argv` before the first argument that is neither a flag nor a flag's value."""
    own: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return own, argv[position + 1 :]
        if not word.startswith("-") or word == "-":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = _name_of(flag_values, name)
        known = _is_flag(flag_values, name)
        own.append(f"--{name}{equals}{value}" if known else word)
        position += 1
        takes_value = name in flag_values and not flag_values[name].boolean
        if takes_value and not equals and position < len(argv):
            own[-1] += f"={argv[position]}"
            position += 1
    return own, argv[position:]


# Checks of flags of `run` that conflict, before anything is started.


def check_combination(strategy: str | None, layout: dict[str, int], given: dict[str, str]) -> None:
    """Checks an entry of the catalogue against the cluster and its options.

    Args:
        strategy: The argument of `--strategy`, or None.
        layout: Dict with the numbers of `workers` and `ps`, and whether there is a `chief`.
        given: Dict from `"compression"` and `"updates"` to texts, without those not given.

    Raises:
        ValueError: If they do not go together; the message says what would.
    """
    _check_spec("compression", given, specs.COMPRESSION, specs.COMPRESSION_ALLOWED)
    _check_spec("updates", given, specs.UPDATES, specs.UPDATES_ALLOWED)
    if strategy is None or (entry := catalogue.find(strategy)) is None:
        return  # A file of the user's own is imported by the tasks.
    _check_layout(entry, layout, strategy)
    problem = entry.problem_with(given)
    if problem is None and "updates" in given:
        problem = _problem_with_updates(entry, given["updates"])
    if problem is not None:
        received = ", ".join(f"--{name}={text}" for name, text in given.items())
        raise UsageError(f"{strategy} {problem}. Received: --strategy={strategy}, {received}")


def chief_of(options: flags.FlagValues) -> bool:
    """Whether a cluster has a chief: by --chief, its servers, or its strategy.

    Args:
        options: The parsed flags, with `chief`, `ps` and `strategy`.
    """
    if options.chief is not None:
        return bool(options.chief)
    entry = None if options.strategy is None else catalogue.find(options.strategy)
    return options.ps > 0 or (entry is not None and entry.strategy == "PipelineStrategy")


def _check_spec(
    name: str, given: Mapping[str, str], forms: Mapping[str, specs.Form], allowed: str
) -> None:
    if name in given and specs.parse(given[name], forms) is None:
        raise UsageError(f"--{name} must be one of {allowed}. Received: --{name}={given[name]}")


def _check_layout(entry: Entry, layout: Mapping[str, int], strategy: str) -> None:
    workers, ps, chief = layout["workers"], layout["ps"], layout["chief"]
    needed = None
    if entry.strategy in ("MultiWorkerMirroredStrategy", None) and ps:
        needed = "has no use for parameter servers: leave out --ps, or take one of " + ", ".join(
            name for name in catalogue.ENTRIES if "parameter_server" in name or "hybrid" in name
        )
    elif entry.strategy in ("ParameterServerStrategy", "HybridStrategy") and not ps:
        needed = "needs parameter servers: add --ps 1, or take --strategy all_reduce"
    elif entry.strategy == "ParameterServerStrategy" and not (chief and workers):
        needed = "needs a chief and workers beside it: leave out --nochief and --workers 0"
    elif entry.strategy == "PipelineStrategy" and ps:
        needed = "keeps variables on its workers, and has no parameter servers: leave out --ps"
    elif entry.strategy == "PipelineStrategy" and not (chief and workers):
        needed = "needs a chief, and a worker for each stage: leave out --nochief and --workers 0"
    if needed:
        received = f"--workers={workers}, --ps={ps}, --{'' if chief else 'no'}chief"
        raise UsageError(f"{strategy} {needed}. Received: --strategy={strategy}, {received}")


def _problem_with_updates(entry: Entry, text: str) -> str | None:
    name = text.partition(":")[0]
    plain = "take --strategy all_reduce without --ps"
    if entry.strategy == "HybridStrategy" and name != "accumulate":
        return f"takes accumulate alone, as its workers share their tables: {plain}"
    if entry.strategy == "ParameterServerStrategy":
        if name == "diloco":
            return f"takes accumulate and local_sgd, as its workers come one by one: {plain}"
        if entry.arguments.get("mode") == "sync" or "max_staleness" in entry.arguments:
            return "takes no updates: they need --strategy async_parameter_server"
    return None


# Numbers of tasks of `run`: its flags --workers, --ps, --chief and --evaluator.


# Each has a port, and the launcher two open files for it.
_MOST_TASKS = 1000


def read_layout(options: flags.FlagValues) -> tuple[dict[str, Any], int | None]:
    """Reads the numbers of tasks.

    Returns:
        Dict of arguments of `plan_tasks`, and how many workers begin if others are to join and
        leave, else None.

    Raises:
        UsageError: If they make no cluster.
    """
    chief = chief_of(options)
    least, workers = workers_of(options.workers)
    if workers is None:
        workers = len(options.hosts) - options.ps - chief if options.hosts else 2
    if workers + chief < 1:
        raise UsageError("a cluster needs at least one worker or a chief")
    if least is not None:
        check_range(options, chief)
    if not options.hosts and workers + options.ps > _MOST_TASKS:
        raise UsageError(
            f"one machine starts at most {_MOST_TASKS} tasks. "
            f"Received: --workers={options.workers}, --ps={options.ps}"
        )
    evaluator = bool(options.evaluator)
    return {"workers": workers, "ps": options.ps, "chief": chief, "evaluator": evaluator}, least


def workers_of(text: str | None) -> tuple[int | None, int | None]:
    """The least number of workers, of a range, and the largest.

    Args:
        text: The flag --workers, or None.

    Raises:
        UsageError: If it is neither a number nor a range.
    """
    if text is None:
        return None, None
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text, re.ASCII)
    if not found:
        raise UsageError(
            "--workers takes a number, or the least and the largest one, as in 1:3. "
            f"Received: --workers={text}"
        )
    least, most = found.groups()
    if least is None:
        return None, int(most)
    if not 1 <= int(least) <= int(most):
        raise UsageError(
            "the first number of --workers is at least 1, and the second at least the first. "
            f"Received: --workers={text}"
        )
    return int(least), int(most)


def check_range(options: flags.FlagValues, chief: bool) -> None:
    """Raises UsageError if workers of the cluster, or of its strategy, cannot come and go."""
    received = f"Received: --workers={options.workers}"
    if not (options.ps and chief):
        raise UsageError(
            "workers come and go in a cluster with a chief and parameter servers, under "
            f"ParameterServerStrategy: add --ps 1, or give --workers one number. {received}, "
            f"--ps={options.ps}, --{'' if chief else 'no'}chief"
        )
    entry = None if options.strategy is None else catalogue.find(options.strategy)
    # One of the user's own says itself whether it can.
    if entry is not None and entry.strategy != "ParameterServerStrategy":
        raise UsageError(
            f"{options.strategy} needs all of its workers: give --workers one number, or take "
            f"--strategy async_parameter_server. {received}, --strategy={options.strategy}"
        )


# Output paths of `run`, checked before anything is started.


def log_dir(folder: str | None) -> pathlib.Path:
    """Creates the folder for the tasks' logs, so that errors show at once.

    Raises:
        UsageError: If it cannot be written.
    """
    try:
        if not folder:
            return pathlib.Path(tempfile.mkdtemp(prefix="keras_psplus_"))
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise UsageError(
            f"the tasks' logs cannot be written: {error}. Name another folder with --log_dir. "
            f"Received: --log_dir={folder or ''}"
        ) from None


def json_log(path: str | None) -> JsonLog | None:
    """Creates the JSON log, if one is wanted, so that errors show at once.

    Raises:
        UsageError: If it cannot be written.
    """
    if path is None:
        return None
    log = JsonLog(path)
    try:
        if not path:
            raise FileNotFoundError("it has no name")
        log.check()
    except OSError as error:
        raise UsageError(
            f"the JSON log cannot be written: {error}. Name a file in a folder that is there. "
            f"Received: --json_log={path}"
        ) from None
    return log


def define_outputs(values: flags.FlagValues) -> None:
    """Defines `--json_log`, `--trace` and `--trace_steps`."""
    flags.DEFINE_string(
        "json_log",
        None,
        "File to which a line of JSON is appended for each summary of training steps (about one a "
        "second from each task), and for each start and end of a task, stall and fault.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "trace",
        None,
        "File for a Chrome trace of some training steps of all tasks, which Perfetto opens.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "trace_steps",
        TRACE_STEPS,
        "Number of steps of each task in the trace, after three of warm-up.",
        lower_bound=1,
        flag_values=values,
    )


def trace(path: str | None, steps: int) -> tuple[pathlib.Path, int] | None:
    """Creates the file of a trace, so that errors show at once.

    Raises:
        UsageError: If it cannot be written.
    """
    if path is None:
        return None
    try:
        with open(path, "a"):
            return pathlib.Path(path), steps
    except OSError as error:
        raise UsageError(
            f"the trace cannot be written: {error}. Name a file in a folder that is there. "
            f"Received: --trace={path}"
        ) from None


# Final report of `run` about a job that has failed.


_TRACEBACK = "Traceback (most recent call last)"
LAST_LINES = 80


def show_failure(result: ClusterResult, log_dir: pathlib.Path, timeout: float) -> None:
    """Writes how a job has ended to stderr, the first failure's cause last.

    Args:
        timeout: Seconds that the job had.
    """
    if result.exit_code == 0 and not result.terminated:
        return
    say = [f"{name}: {result.how_ended(name)}" for name in result.log_paths]
    if result.timed_out:
        say.append(f"ended after the time-out of {timeout:g} s")
    if result.signal is not None:
        say.append(f"ended by signal {result.signal}")
    say.append(f"logs: {log_dir}")
    if result.first_failure is not None:
        say += ["", f"{result.first_failure} failed first:", *_last_words(result)]
    with contextlib.suppress(OSError):  # nobody reads it, and the exit code is the job's
        print("\n".join(["", *say]), file=sys.stderr, flush=True)


def _last_words(result: ClusterResult) -> list[str]:
    """The first failure's last traceback, or the end of its log."""
    assert result.first_failure is not None
    lines = result.logs[result.first_failure].splitlines()
    is_noise = NoiseFilter().is_noise
    traceback = [line for line in last_traceback(lines) if not is_noise(line)]
    return traceback[-LAST_LINES:] or lines[-20:]


def last_traceback(lines: list[str]) -> list[str]:
    """The lines from the beginning of the last traceback on; none if there is none."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    return lines[starts[-1] :] if starts else []


# The flags that say what `keras_psplus.strategy_from_env()` returns in the script.


def define_strategy(values: flags.FlagValues) -> None:
    """Defines --strategy, --compression and --updates."""
    flags.DEFINE_string(
        "strategy",
        None,
        "What `keras_psplus.strategy_from_env()` returns in the script: an entry of the catalogue "
        "(--list) or a .py file that defines `strategy()`.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "compression",
        None,
        "The `compression` of that strategy: bf16, fp16, int8, sign, topk:0.01, randomk:0.1, "
        "powersgd:4, factors, factors:bf16 or factors:fp16.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "updates",
        None,
        "Its `updates`: accumulate:4, local_sgd:8 or diloco:100.",
        flag_values=values,
    )


def variables(options: flags.FlagValues, layout: dict[str, int]) -> dict[str, str]:
    """The environment variables from which `keras_psplus.strategy_from_env()` learns what to make.

    Args:
        layout: Dict with the numbers of `workers` and `ps`, and whether there is a `chief`.

    Raises:
        UsageError: If the flags do not go together.
    """
    given = {
        option: text
        for option in catalogue.OPTION_VARIABLES
        if (text := getattr(options, option)) is not None
    }
    strategy = options.strategy
    check_combination(strategy, layout, given)
    found = {catalogue.OPTION_VARIABLES[option]: text for option, text in given.items()}
    if strategy is not None:
        is_entry = catalogue.find(strategy) is not None
        path = pathlib.Path(strategy).expanduser().resolve()
        found[catalogue.STRATEGY_VARIABLE] = strategy if is_entry else str(path)
    return found
