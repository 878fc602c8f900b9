"""Public interface: names with their arguments, flags, strategies by name, environment variables.

`python -m tests.interface` writes interface.txt, which has what the last release had, or what the
changelog of the first one describes; test_public_names.py wants each difference to be named in
CHANGELOG.md.
"""

import importlib
import inspect
import pathlib
import re

from keras_psplus import catalogue
from keras_psplus.cli import main as command_line
from tests.docs import test_variables

ROOT = pathlib.Path(__file__).parents[1]
FILE = pathlib.Path(__file__).with_name("interface.txt")
MODULES = ("callbacks", "compression", "errors", "layers", "serving", "tables", "updates")
_SHOWN = re.compile(r"^::: keras_psplus\.(.+)\.(\w+)$", re.MULTILINE)
_LONG = 40  # characters of a default


def names():
    """Objects by public names: those of `__all__`, and what the API reference shows beside them."""
    found = {}
    for module in ("", *MODULES):
        home = importlib.import_module(f"keras_psplus.{module}".rstrip("."))
        for name in home.__all__:
            if not inspect.ismodule(value := getattr(home, name)):
                found[".".join(filter(None, ("psp", module, name)))] = value
    for module, name in _SHOWN.findall((ROOT / "docs/reference.md").read_text()):
        value = getattr(importlib.import_module(f"keras_psplus.{module}"), name)
        if not any(value is other for other in found.values()):
            found[f"keras_psplus.{module}.{name}"] = value
    return found


def flags():
    """Actions of argparse by commands."""
    found = {}
    for command in command_line._COMMANDS:
        module = importlib.import_module(f"keras_psplus.cli.{command.replace('-', '_')}")
        parser = getattr(module, "_parser", None)  # `bench` hands all on
        actions = parser()._actions if parser else ()
        found[command] = [each for each in actions if each.help != "==SUPPRESS=="]
    return found


def lines():
    """The interface, a line for each name."""
    public = names()
    found = [line for name, value in public.items() for line in _of(name, value, public.values())]
    for command, actions in flags().items():
        found.append(f"keras-psplus {command}")
        for action in actions:
            parts = [f"default={action.default}", *(action.choices or ())]
            found.append(f"keras-psplus {command} --{action.dest}({', '.join(parts)})")
    found += [f"--strategy {name}" for name in catalogue.ENTRIES]
    found += [f"{name}({default})" for name, default in test_variables.PUBLIC.items()]
    return sorted(found)


def changes(before, after):
    """Words that a changelog has to have: those of what differs between two interfaces.

    Args:
        before: Lines.
        after: Lines.

    Returns:
        Dict from the words to the names where they differ.
    """
    before, after = ({line.partition("(")[0]: line for line in lines} for lines in (before, after))
    found = {}
    for name in sorted(before.keys() | after.keys()):
        # Whoever names a class that is new, or gone, need not name what it has.
        owner = name.rpartition(".")[0]
        if before.get(name) != after.get(name) and (owner in before) == (owner in after):
            word = re.split(r"[. ]", name)[-1]
            if name in before and name in after and "--" not in name and not name.isupper():
                parts = set(_parts(before[name])) ^ set(_parts(after[name]))
                words = {part.partition("=")[0].strip("*") for part in parts} - {""} or {word}
            else:
                words = {word}
            for each in words:
                found.setdefault(each, []).append(name)
    return found


def unnamed(changed, changelog):
    """Those of `changes` that no code of the changelog's first section has."""
    section = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    code = " ".join(re.findall(r"`[^`]+`", section))
    return {
        word: where
        for word, where in changed.items()
        if not re.search(rf"(?<![\w-]){re.escape(word)}(?!\w)", code)
    }


def _parts(line):
    return line.partition("(")[2].removesuffix(")").split(", ")


def _of(name, value, public):
    if not callable(value):
        yield name
        return
    if not inspect.isclass(value):
        yield name + _arguments(value)
        return
    if issubclass(value, BaseException):
        yield name
        return
    yield name + _arguments(value.__init__)
    # Attributes of Keras, TensorFlow or a public base of ours.
    bases = value.__mro__[1:]
    bases = [b for b in bases if b in public or not b.__module__.startswith("keras_psplus")]
    inherited = {attribute for base in bases for attribute in dir(base)}
    for attribute in dir(value):
        if not attribute.startswith("_") and attribute not in inherited:
            member = inspect.getattr_static(value, attribute)
            member = getattr(member, "__func__", member)
            arguments = _arguments(member) if inspect.isfunction(member) else ""
            yield f"{name}.{attribute}{arguments}"


def _arguments(function):
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        default = re.sub(r"<.* at 0x\w+>|<factory>", "...", repr(parameter.default))
        name = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        if parameter.default is parameter.empty:
            parts.append(name)
        else:
            parts.append(f"{name}={default if len(default) <= _LONG else '...'}")
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(p[0] for p in parts):
            parts.insert(-1, "*")
    return f"({', '.join(part for part in parts if part not in ('self', 'cls'))})"


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
    print(f"{FILE.relative_to(ROOT)}: {len(lines())} lines")
