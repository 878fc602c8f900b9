"""Files of strangers: small, and of public names alone."""

import ast
import pathlib

from tests.support.tables import for_each

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
PUBLIC = {
    *("keras_psplus", "keras_psplus.engine", "keras_psplus.compression", "keras_psplus.updates"),
    *(f"keras_psplus.{p}" for p in ("all_reduce", "hybrid", "parameter_server", "pipeline")),
}


@for_each("name", ["averaging", "gossip", "own_rule"])
def test_a_stranger_needs_sixty_lines_and_public_names(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] != "keras_psplus" or node.module in PUBLIC
        elif isinstance(node, ast.Import):
            names = [n.name for n in node.names if n.name.startswith("keras_psplus")]
            assert set(names) <= PUBLIC


def test_the_documented_strategy_is_the_file():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for part in (FOLDER / "averaging.py").read_text().split("\n\n\n")[1:3]:
        assert part in page
