"""Flags of `keras-psplus` commands: parsing, and checks before anything is started."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import pathlib
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from keras_psplus import catalogue, specs
from keras_psplus.catalogue import Entry
from keras_psplus.cli import foreign_calls
from keras_psplus.cluster.console import NoiseFilter
from keras_psplus.cluster.launcher import remote
from keras_psplus.cluster.launcher.task_ends import ClusterResult
from keras_psplus.cluster.monitor.job import JsonLog
from keras_psplus.cluster.monitor.trace import STEPS as TRACE_STEPS

# Flags of horovodrun, mpirun, torchrun, deepspeed and srun, and what they are here.
_HABITS = {
    **dict.fromkeys(
        "-n -np --np --nproc --num-proc --nproc-per-node --num-gpus".split(), "workers"
    ),
    **dict.fromkeys("--ntasks --num-workers --world-size".split(), "workers"),
    **dict.fromkeys("-H --host --nodes --nodelist".split(), "hosts"),
    **dict.fromkeys("-hostfile --machinefile".split(), "hostfile"),
}

# Flags before the first other argument, everything from there on untouched.


class UsageError(Exception):
    """The command line cannot be used; the message says what would do."""


class HelpShown(Exception):
    """The command line has asked for help, which is printed."""


class Parser(argparse.ArgumentParser):
    """Flags of a command, at its beginning.

    They are spelled with underscores or dashes. A switch is also `--nochief`, `--no-chief` or
    `--chief=false`.

    Args:
        usage: The command's help above its flags.
        groups: Dict from headings of the help to the names of the flags below them; the flags that
            are in none come last.
    """

    def __init__(self, usage: str, groups: Mapping[str, str] | None = None) -> None:
        line, _, text = usage.strip().removeprefix("usage: ").partition("\n\n")
        super().__init__(
            prog=line.split()[1],
            usage=line,
            description=text,
            formatter_class=_Formatter,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        self._groups = {
            name: group
            for title, names in (groups or {}).items()
            for group in [self.add_argument_group(title)]
            for name in names.split()
        }
        self._flags = self.add_argument_group(
            "flags (with dashes, as --max-restarts, or underscores)"
        )
        self.names: dict[str, str] = {}  # by spellings

    def text(self, name: str, help: str, default: str | None = None) -> None:
        """Adds a flag whose value is not empty."""
        self._add(name, help, default, type=functools.partial(_text, name))

    def texts(self, name: str, help: str) -> None:
        """Adds a flag whose values are separated by commas."""
        self._add(name, help, type=functools.partial(_texts, name))

    def words(self, name: str, help: str) -> None:
        """Adds a flag whose value is a command, as a shell splits it."""
        self._add(name, help, type=functools.partial(_words, name))

    def number(
        self, name: str, kind: type, help: str, default: Any = None, least: float = 0
    ) -> None:
        """Adds a flag whose value is a finite number."""
        self._add(name, help, default, type=functools.partial(_number, name, kind, least))

    def choice(self, name: str, choices: Sequence[str], help: str) -> None:
        """Adds a flag whose value is one of some words."""
        self._add(name, f"<{'|'.join(choices)}>: {help}", choices=choices)

    def switch(self, name: str, help: str, default: bool | None = False) -> None:
        """Adds a flag without a value."""
        self._add(name, help, default, action="store_true")
        spellings = _spellings(name)
        no = [f"--{no}{own[2:]}" for no in ("no", "no_", "no-") for own in spellings]
        self.names.update(dict.fromkeys(no, f"no{name}"))
        for action, more, words in (("true", [], "true True 1"), ("false", no, "false False 0")):
            self._flags.add_argument(
                *more,
                *(f"{spelling}={word}" for spelling in spellings for word in words.split()),
                dest=name,
                default=default,
                action=f"store_{action}",
                help=argparse.SUPPRESS,
            )

    def _add(self, name: str, help: str, default: Any = None, **kind: Any) -> None:
        spellings = _spellings(name)
        self.names.update(dict.fromkeys(spellings, name))
        if default is not None:
            help += f" (default: {default})"
        group = self._groups.get(name, self._flags)
        group.add_argument(*spellings, dest=name, default=default, help=help, **kind)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses a command line.

        Returns:
            The flags' values, and as `command` the arguments after them: the script and what
            belongs to it.

        Raises:
            UsageError: If a flag is unknown, or has a wrong value or none.
            HelpShown: If it asks for help.
        """
        try:
            options, unknown = self.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise UsageError(f"{error}. Received: {shlex.join(argv)}") from None
        if unknown:
            given = unknown[0].partition("=")[0]
            near = specs.nearest(given, self.names)
            name = _HABITS.get(given.replace("_", "-"), self.names[near] if near else None)
            hint = f" Did you mean: --{name}?" if name in self.names.values() else ""
            raise UsageError(f"There is no such flag.{hint} Received: {unknown[0]}")
        if options.command[:1] == ["--"]:
            del options.command[0]
        return options

    def read_flags(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses a command line of flags alone."""
        options = self.read(argv)
        if options.command:
            raise UsageError(
                f"{self.prog} takes no arguments, only flags. "
                f"Received: {shlex.join(options.command)}"
            )
        return options

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the parsing, where argparse would end the process, after `--help`."""
        raise HelpShown


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=22, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return f"--[no]{action.dest}" if action.nargs == 0 else f"--{action.dest}"


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _text(name: str, text: str) -> str:
    if not text:  # as of a variable of the shell that is not set
        raise UsageError(f"--{name} needs a value. Received: --{name}=''")
    return text


def _texts(name: str, text: str) -> list[str]:
    return [word.strip() for word in _text(name, text).split(",")]


def _words(name: str, text: str) -> list[str]:
    try:
        return shlex.split(_text(name, text))
    except ValueError as error:
        raise UsageError(f"--{name} is no command: {error}. Received: --{name}={text}") from None


def _number(name: str, kind: type, least: float, text: str) -> Any:
    try:
        value = kind(_text(name, text))
    except ValueError:
        value = math.nan
    if value in (math.inf, -math.inf) or value != value:
        number = "a finite number" if kind is float else "a whole number"
        raise UsageError(f"--{name} must be {number}. Received: --{name}={text}")
    if value < least:
        raise UsageError(f"--{name} must be at least {least}. Received: --{name}={text}")
    return value


def check_script(command: list[str]) -> None:
    """Raises `UsageError` if a command does not begin with a script that is there."""
    if not command:
        raise UsageError("name the script to run, after the flags")
    if not pathlib.Path(command[0]).is_file():
        raise UsageError(f"there is no script {command[0]!r}")


def remarks(parser: Parser, command: list[str], trains: int) -> list[str]:
    """Warnings about probable mistakes: flags behind the script, another backend of Keras.

    Args:
        command: The script, which exists, and its arguments.
        trains: Number of tasks that train.

    Raises:
        UsageError: If the script leaves it to another library that they train together.
    """
    lines = []
    script = pathlib.Path(command[0]).read_text(errors="replace")
    behind = {parser.names.get(word.partition("=")[0]) for word in command[1:]}
    # A script that has a flag of this name is meant by it.
    ours = sorted(name for name in behind if name is not None and name not in script)
    if ours:
        listed = ", ".join(f"--{name}" for name in ours)
        lines.append(
            f"{listed}: behind the script, and so passed to it; flags of keras-psplus go before it"
        )
    if trains > 1 and (calls := foreign_calls.find(command[0], script)):
        if foreign_calls.are_alone(script):
            raise UsageError(f"{calls[0]}. Received: {command[0]}")
        lines += calls
    backend = os.environ.get("KERAS_BACKEND", "")
    if backend not in ("", "tensorflow") and "KERAS_BACKEND" not in script:
        lines.append(
            f"KERAS_BACKEND={backend}: the strategies need Keras's TensorFlow backend; unset it"
        )
    return lines


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


def chief_of(options: argparse.Namespace) -> bool:
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
        hint = specs.hint(given[name], forms)
        raise UsageError(
            f"--{name} must be one of {allowed}.{hint} Received: --{name}={given[name]}"
        )


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


def read_layout(options: argparse.Namespace) -> tuple[dict[str, Any], int | None]:
    """Reads the numbers of tasks.

    Returns:
        Dict of arguments of `plan_tasks`, and how many workers begin if others are to join and
        leave, else None.
    """
    chief = chief_of(options)
    least, workers = workers_of(options.workers)
    if workers is None:
        workers = len(options.hosts) - options.ps - chief if options.hosts else 2
        if options.hosts and workers < 1:
            raise UsageError(
                f"{options.ps} ps{' and a chief' * chief} leave no host for a worker: name a host "
                "for each task, or several tasks of a host, as in A:2,B. "
                f"Received: --hosts={','.join(options.hosts)}, --ps={options.ps}"
            )
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


def check_range(options: argparse.Namespace, chief: bool) -> None:
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


# Hosts of `run`.


def add_hosts(parser: Parser, start_seconds: float = remote.START_SECONDS) -> None:
    """Adds `--hosts` and how to reach them."""
    parser.texts(
        "hosts",
        "Hosts of the tasks in order (chief, workers, ps), started by ssh in this folder: A,B or "
        "A:2,B:2 for two tasks each (a number from 1000 on is a port; default: 2222 and up).",
    )
    parser.text("hostfile", "Hosts of the tasks in a file as OpenMPI's, with lines as `A slots=2`.")
    parser.words(
        "ssh",
        "Command that reaches a host, e.g. 'ssh -p 2222' (default: ssh; this machine's own tasks "
        "need none).",
    )
    parser.text("remote_python", "Python on the hosts (default: the path of this one).")
    parser.number(
        "start_timeout",
        float,
        "Seconds that a host may take to answer.",
        start_seconds,
        least=1,
    )


def read_hosts(options: argparse.Namespace) -> bool:
    """Has `hosts` name the host of each task; returns whether there are any."""
    if options.hostfile is not None and options.hosts is not None:
        raise UsageError(
            "--hosts and --hostfile name the same: leave out one. "
            f"Received: --hosts={','.join(options.hosts)}, --hostfile={options.hostfile}"
        )
    try:
        if options.hostfile is not None:
            options.hosts = remote.read_hostfile(options.hostfile)
        if options.hosts is not None:
            options.hosts = remote.expand(options.hosts)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.hosts is not None:
        if not options.hosts:
            raise UsageError(f"no host is named. Received: --hostfile={options.hostfile}")
        if getattr(options, "warm", False):
            raise UsageError("--warm starts tasks of this machine alone. Received: --warm, --hosts")
        return True
    for name in ("ssh", "remote_python"):
        if (value := getattr(options, name)) is not None:
            given = value if isinstance(value, str) else shlex.join(value)
            raise UsageError(f"--{name} goes with --hosts. Received: --{name}={given}")
    return False


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
    """Creates the JSON log, if one is wanted, so that errors show at once."""
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


def add_roles(parser: Parser) -> None:
    """Adds `--ps` and `--chief`."""
    parser.number("ps", int, "Number of parameter servers.", 0)
    parser.switch(
        "chief",
        "Whether there is a chief beside the workers (default: if there are parameter servers, or "
        "with --strategy pipeline).",
        None,
    )


OUTPUTS = ("chief", "all")


def add_outputs(parser: Parser) -> None:
    """Adds `--json_log`, `--trace` and `--trace_steps`."""
    parser.text(
        "json_log",
        "File to which a line of JSON is appended for each summary of training steps (about one a "
        "second from each task), and for each start and end of a task, stall and fault.",
    )
    parser.text(
        "trace",
        "File for a Chrome trace of some training steps of all tasks, which Perfetto opens.",
    )
    parser.number(
        "trace_steps",
        int,
        "Number of steps of each task in the trace, after three of warm-up.",
        TRACE_STEPS,
        least=1,
    )


def trace(path: str | None, steps: int) -> tuple[pathlib.Path, int] | None:
    """Creates the file of a trace, so that errors show at once."""
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
_LOST = "stopped answering"


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
        words = _last_words(result)
        say += ["", f"{result.first_failure} failed first:", *words, *_ended_before(result, words)]
    with contextlib.suppress(OSError):  # nobody reads it, and the exit code is the job's
        print("\n".join(["", *say]), file=sys.stderr, flush=True)


def _last_words(result: ClusterResult) -> list[str]:
    """The first failure's last traceback, or the end of its log."""
    assert result.first_failure is not None
    lines = result.logs[result.first_failure].splitlines()
    is_noise = NoiseFilter().is_noise
    traceback = [line for line in last_traceback(lines) if not is_noise(line)]
    if traceback:
        return traceback[-LAST_LINES:]
    # A task that was killed has said nothing of that: its own last lines are the nearest.
    is_noise = NoiseFilter().is_noise
    return [line for line in lines if not is_noise(line)][-20:] or lines[-20:]


def _ended_before(result: ClusterResult, words: list[str]) -> list[str]:
    """A line on tasks whose scripts had ended well, though the first failure needed them."""
    text = "\n".join(words)
    names = [
        name
        for name, code in result.exit_codes.items()
        if code == 0 and name not in result.terminated and f"{name} (" in text
    ]
    if not names or _LOST not in text:
        return []
    return [
        "",
        f"{', '.join(names)}: the script had ended there with exit code 0, while "
        f"{result.first_failure} still trained. All workers call fit, evaluate and predict; only "
        "what one of them writes or prints stands below `if strategy.is_chief:`",
    ]


def last_traceback(lines: list[str]) -> list[str]:
    """The lines from the beginning of the last traceback on; none if there is none."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    return lines[starts[-1] :] if starts else []


# The flags that say what `keras_psplus.strategy_from_env()` returns in the script.


def add_strategy(parser: Parser) -> None:
    """Adds --strategy, --compression and --updates."""
    parser.text(
        "strategy",
        "What `keras_psplus.strategy_from_env()` returns in the script: an entry of the catalogue "
        "(--list) or a .py file that defines `strategy()`.",
    )
    parser.text(
        "compression",
        "The `compression` of that strategy: bf16, fp16, int8, sign, topk:0.01, randomk:0.1, "
        "powersgd:4, factors, factors:bf16 or factors:fp16.",
    )
    parser.text("updates", "Its `updates`: accumulate:4, local_sgd:8 or diloco:100.")


def variables(options: argparse.Namespace, layout: dict[str, int]) -> dict[str, str]:
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
