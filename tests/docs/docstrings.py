"""Checks the first line of each docstring; `make lint` runs it.

A first line names the thing with a noun of the field ("Duplicate rows in IndexedSlices.") or says
with a verb what a function does ("Reduces buckets of gradients."), as those of Keras and
torchgpipe do. A clause ("What a worker has sent") is neither: it leaves out the name. A predicate
may begin with "Whether". Reads source files alone and imports none of them.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("keras_psplus", "examples", "benchmarks")
MOST_WORDS = 15
_CLAUSES = {"what", "which", "how", "who", "whom", "whose", "where", "when", "why", "that"}
_CLAUSES |= {"whatever", "whichever", "whoever", "however", "wherever", "whenever"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def faults(line):
    """Yields what is wrong with the first line of a docstring, and what to do."""
    words = line.split()
    first = re.split(r"\W", words[0], maxsplit=1)[0] if words else ""
    if first.lower() in _CLAUSES:
        yield f"begins with {first!r}; begin with a noun that names the thing, or a verb"
    if len(words) > MOST_WORDS:
        yield f"has {len(words)} words; say the rest in a second sentence below ({MOST_WORDS} fit)"
    if "?" in line:
        yield "asks a question; say what the thing is or does"
    if not line.endswith("."):
        yield "does not end with a period; the first line is one whole sentence"
    elif re.search(r"(?<!e\.g)[.!] +[A-Z`]", line):
        yield "has two sentences; put the second below an empty line"


def docstrings(tree):
    """Yields the docstrings of a module, its classes and functions, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text


def check(paths):
    """Lists `file:line: fault` for all docstrings of files."""
    found = []
    for path in paths:
        for number, text in docstrings(ast.parse(path.read_text())):
            line = text.partition("\n")[0]
            found += [f"{path}:{number}: {fault}: {line!r}" for fault in faults(line)]
    return found


def sources(root=ROOT):
    """The Python files that a user reads."""
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]


if __name__ == "__main__":
    found = check(path.relative_to(pathlib.Path.cwd()) for path in sources(pathlib.Path.cwd()))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(f"{len(found)} first lines of docstrings are to be rewritten." if found else 0)
