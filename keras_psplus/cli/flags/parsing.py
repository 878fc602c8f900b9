"""Flags before the first other argument, everything from there on untouched."""

import math
import os
import pathlib
import shlex
import sys
import textwrap

from absl import flags


class UsageError(Exception):
    """The command line cannot be used; the message says what would do."""


def parse(flag_values: flags.FlagValues, argv: list[str]) -> list[str]:
    """Parses the flags at the start of `argv`.

    Args:
        flag_values: An `absl.flags.FlagValues` with the command's flags.
        argv: Arguments of the command.

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
