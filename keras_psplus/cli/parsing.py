"""Flags before the first other argument, everything from there on untouched."""

import math
import pathlib
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
        UsageError: If a flag is unknown or has a wrong value.
    """
    own, rest = _split(flag_values, argv)
    try:
        flag_values(["keras-psplus", *own])
    except flags.Error as error:
        raise UsageError(str(error)) from None
    for name in flag_values:
        value = flag_values[name].value
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} must be a finite number. Received: --{name}={value}")
    return rest


def check_script(command: list[str]) -> None:
    """Raises `UsageError` if a command does not begin with a script that is there."""
    if not command:
        raise UsageError("name the script to run, after the flags")
    if not pathlib.Path(command[0]).is_file():
        raise UsageError(f"there is no script {command[0]!r}")


def asks_for_help(flag_values: flags.FlagValues, argv: list[str]) -> bool:
    """Whether `--help` or `-h` is among the command's own arguments."""
    own, rest = _split(flag_values, argv)
    return bool({"-h", "--help"} & {*own, *rest[:1]})


def help_text(usage: str, flag_values: flags.FlagValues) -> str:
    """Returns a command's help: its usage and its flags with their defaults."""
    lines = [usage.strip(), "", "flags:"]
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


def _split(flag_values, argv):
    """Splits `argv` before the first argument that is neither a flag nor a flag's value."""
    own, position = [], 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return own, argv[position + 1 :]
        if not word.startswith("-") or word == "-":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")  # --dry-run is --dry_run
        known = name in flag_values or name.removeprefix("no") in flag_values
        own.append(f"--{name}{equals}{value}" if known else word)
        position += 1
        takes_value = name in flag_values and not flag_values[name].boolean
        if takes_value and not equals and position < len(argv):
            own[-1] += f"={argv[position]}"
            position += 1
    return own, argv[position:]
