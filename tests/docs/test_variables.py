"""Environment variables: those that the library reads, its table of them, and the manual's."""

import ast
import re

from keras_psplus.cluster.environment import VARIABLES
from tests import structure
from tests.docs import pages

NAME = re.compile(r"KERAS_PSPLUS_[A-Z_]*[A-Z]\b")
ROW = re.compile(r"^\| `(KERAS_PSPLUS_\w+)` \| (?:`(.*?)`)? *\|", re.MULTILINE)
# Of the tests, and what stands for several.
OTHERS = {"KERAS_PSPLUS_LARGE_TESTS", "KERAS_PSPLUS_TLS"}
PUBLIC = {name: each.default for name, each in VARIABLES.items() if each.is_public}


def named():
    """Pairs of a variable's name and the module in which it is assigned."""
    root = structure.ROOT / structure.PACKAGE
    for path, tree in structure.trees().items():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for statement in tree.body:
            is_table = ast.unparse(statement).startswith("VARIABLES")
            if isinstance(statement, ast.Assign) and not is_table:
                for node in ast.walk(statement):
                    if isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
                        yield node.value, module


def test_the_table_has_what_the_library_reads():
    assert sorted(named()) == sorted((name, each.module) for name, each in VARIABLES.items())


def test_the_reference_has_the_public_ones():
    assert dict(ROW.findall((pages.ROOT / "docs/reference.md").read_text())) == PUBLIC


def test_the_manual_has_no_others():
    text = "\n".join(page.read_text() for page in pages.PAGES)
    assert set(NAME.findall(text)) - OTHERS == PUBLIC.keys()


def test_nothing_is_read_at_import():
    for path, tree in structure.trees().items():
        for statement in tree.body:
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                text = ast.unparse(statement)
                assert not re.search(r"environ(\[|\.get)|getenv", text), f"{path}: {text}"
