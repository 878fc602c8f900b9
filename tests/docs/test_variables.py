"""Environment variables: those that the library reads, a table of them, and the manual's."""

import ast
import re
from typing import NamedTuple

from tests import structure
from tests.docs import pages

NAME = re.compile(r"KERAS_PSPLUS_[A-Z_]*[A-Z]\b")
ROW = re.compile(r"^\| `(KERAS_PSPLUS_\w+)` \| (?:`(.*?)`)? *\|", re.MULTILINE)
# Of the tests, and what stands for several.
OTHERS = {"KERAS_PSPLUS_LARGE_TESTS", "KERAS_PSPLUS_TLS"}


class Variable(NamedTuple):
    """An environment variable, which is read when it is needed, and not at import.

    Attributes:
        module: The module that knows its name, without the library's.
        default: What counts where it is not set; empty for nothing.
        is_public: Whether it is in the manual. Others are between a launcher and its tasks.
    """

    module: str
    default: str = ""
    is_public: bool = True


VARIABLES = {
    "KERAS_PSPLUS_CLUSTER": Variable("cluster.discovery.find"),
    "KERAS_PSPLUS_COMPRESSION": Variable("catalogue"),
    "KERAS_PSPLUS_FIRST_RANK": Variable("cluster.discovery.launchers", "0"),
    "KERAS_PSPLUS_GRACE": Variable("cluster.process.signals", "inf"),
    "KERAS_PSPLUS_HOSTS": Variable("cluster.discovery.launchers"),
    "KERAS_PSPLUS_JOB_DIR": Variable("cluster.monitor.job", is_public=False),
    "KERAS_PSPLUS_JOB_TOKEN": Variable("cluster.environment"),
    "KERAS_PSPLUS_JSON_LOG": Variable("cluster.monitor.job"),
    "KERAS_PSPLUS_LAYOUT": Variable("cluster.discovery.launchers"),
    "KERAS_PSPLUS_MIN_WORKERS": Variable("cluster.environment"),
    "KERAS_PSPLUS_NATIVE": Variable("native", "1"),
    "KERAS_PSPLUS_PLAN": Variable("catalogue", is_public=False),
    "KERAS_PSPLUS_PORT": Variable("cluster.discovery.launchers"),
    "KERAS_PSPLUS_RESTART": Variable("cluster.environment", "0"),
    "KERAS_PSPLUS_ROLE": Variable("cluster.discovery.launchers"),
    "KERAS_PSPLUS_SKIP_VERSION_CHECK": Variable("versions", "0"),
    "KERAS_PSPLUS_STARTED_BY": Variable("cluster.process.left_processes", is_public=False),
    "KERAS_PSPLUS_STEP_OBSERVER": Variable("cluster.monitor.progress", is_public=False),
    "KERAS_PSPLUS_STRATEGY": Variable("catalogue"),
    "KERAS_PSPLUS_SUBDOMAIN": Variable("cluster.discovery.launchers", is_public=False),
    "KERAS_PSPLUS_TLS_CA": Variable("cluster.channel"),
    "KERAS_PSPLUS_TLS_CERT": Variable("cluster.channel"),
    "KERAS_PSPLUS_TLS_KEY": Variable("cluster.channel"),
    "KERAS_PSPLUS_TLS_NAME": Variable("cluster.channel"),
    "KERAS_PSPLUS_TRACE": Variable("cluster.monitor.trace"),
    "KERAS_PSPLUS_TRACE_STEPS": Variable("cluster.monitor.trace", "20"),
    "KERAS_PSPLUS_TRAINING_END": Variable("cluster.environment", is_public=False),
    "KERAS_PSPLUS_UPDATES": Variable("catalogue"),
}

PUBLIC = {name: each.default for name, each in VARIABLES.items() if each.is_public}


def named():
    """Pairs of a variable's name and the module in which it is assigned."""
    root = structure.ROOT / structure.PACKAGE
    for path, tree in structure.trees().items():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
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
