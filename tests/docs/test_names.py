"""What README.md and docs/*.md call by its full name is in the library."""

import importlib
import re

import pytest

import keras_psplus  # noqa: F401
from tests.docs import pages
from tests.support.tables import for_each

_NAME = re.compile(r"(?:psp|keras_psplus)((?:\.\w+)+)")


def resolve(path):
    """Returns what `keras_psplus` and a dotted path stand for; imports modules on the way."""
    found, module = keras_psplus, "keras_psplus"
    for name in path:
        module += f".{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            found = importlib.import_module(module)
    return found


@for_each("page", pages.PAGES)
def test_names_in_text_exist(page):
    for token in pages.inline(page, "code_inline"):
        for dotted in _NAME.findall(token.content):
            resolve(dotted[1:].split("."))


def test_an_unknown_name_is_found_out():
    assert resolve(["cluster", "processes", "LocalCluster"])
    with pytest.raises(ModuleNotFoundError):
        resolve(["cluster", "processes", "NoSuchCluster"])
