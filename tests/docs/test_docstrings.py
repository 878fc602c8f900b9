"""Every public name has a docstring, with `Args` where it takes some, for docs/reference.md.

The first lines of all docstrings keep the rule of docstrings.py.
"""

import importlib
import inspect
import re

import keras_psplus
from tests.docs import docstrings, pages
from tests.support.tables import for_each

MODULES = [
    "keras_psplus",
    *(f"keras_psplus.{name}" for name in ("all_reduce", "callbacks", "cluster", "compression")),
    *(f"keras_psplus.{name}" for name in ("hybrid", "layers", "parameter_server", "pipeline")),
    *(f"keras_psplus.{name}" for name in ("tables", "updates")),
    "keras_psplus.cluster.in_process",
    "keras_psplus.errors",
]
# What is documented in the reference beside the names of `__all__`.
BESIDE = re.findall(r"^::: (\S+)$", (pages.ROOT / "docs" / "reference.md").read_text(), re.M)


def public():
    """Yields the full names of all public objects, and the objects, each once."""
    names = [f"{module}.{name}" for module in MODULES for name in names_of(module)]
    seen = set()
    for name in [*names, *(name for name in BESIDE if name not in MODULES)]:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        if inspect.ismodule(found) or isinstance(found, str) or id(found) in seen:
            continue
        seen.add(id(found))
        yield name, found
        if inspect.isclass(found):
            for member, value in vars(found).items():
                value = getattr(value, "__func__", value)
                if not member.startswith("_") and is_documented_alone(value):
                    yield f"{name}.{member}", getattr(found, member)


def is_documented_alone(member):
    """Whether it is a method or a property, and no attribute, which its class describes."""
    return inspect.isfunction(member) or isinstance(member, property)


def names_of(module):
    return importlib.import_module(module).__all__


OBJECTS = dict(public())
# Its methods take Keras's function, as the class says, and that function's own arguments.
AS_KERAS = "keras_psplus.engine.Engine."


@for_each("name", OBJECTS)
def test_has_a_docstring_with_args(name):
    found = OBJECTS[name]
    text = inspect.getdoc(found)  # of a method that replaces another, also the other's
    assert text, f"{name} has no docstring"
    if name.startswith(AS_KERAS):
        return
    missing = [each for each in arguments(found) if not re.search(rf"^ +{each}: ", text, re.M)]
    # A method that says something of its own about one that the base class describes.
    if missing and "." in name and (base := inherited(name)):
        missing = [each for each in missing if not re.search(rf"^ +{each}: ", base, re.M)]
    assert not missing, f"`Args` of {name} lack {missing}"


def arguments(found):
    if isinstance(found, property):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    if inspect.isclass(found) and issubclass(found, BaseException):
        return []  # raised by the library
    return [p.name for p in parameters if p.name not in ("self", "cls") and p.kind not in kinds]


def inherited(name):
    """The docstring of the method that a method replaces."""
    owner, _, member = name.rpartition(".")
    bases = OBJECTS[owner].__mro__[1:] if inspect.isclass(OBJECTS.get(owner)) else ()
    return next((inspect.getdoc(vars(b)[member]) for b in bases if member in vars(b)), None)


def test_the_reference_has_all_public_names():
    shown = {name.rpartition(".")[2] for name in BESIDE}
    shown |= {name for module in MODULES if module in BESIDE for name in names_of(module)}
    assert {name for name in keras_psplus.__all__ if name != "__version__"} <= shown


def test_first_lines_name_things():
    found = docstrings.check(docstrings.sources())
    assert not found, "\n".join(found)


@for_each(
    "line, fault",
    [
        ("Duplicate rows in IndexedSlices.", None),
        ("Reduces buckets of gradients, e.g. `Dense` layers'.", None),
        ("Whether a gradient has rows.", None),
        ("What a worker has sent.", "'What'"),
        ("Which rows a worker reads.", "'Which'"),
        ("Whose gradients are summed.", "'Whose'"),
        ("Gradients " + "that are summed " * 5 + ".", "17 words"),
        ("Which one?", "question"),
        ("Gradients of a step", "period"),
        ("Sends gradients. Waits for sums.", "two sentences"),
    ],
)
def test_faults_of_first_lines(line, fault):
    found = " ".join(docstrings.faults(line))
    assert (fault in found) if fault else not found
