"""Whether two commits have the same code, up to the modules that it lies in and their imports.

    python tests/same_code.py BEFORE AFTER [NEW=OLD ...]

Compares the statements of all modules of the package as syntax trees, without docstrings of
modules, imports of the package, and the names of its modules before a dot: functions of one name in
two modules are taken for each other. What is imported from elsewhere is compared as a whole.
NEW=OLD are names that a merged module had twice.
"""

import ast
import collections
import io
import pathlib
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "keras_psplus"


def sources(commit):
    """Texts of the package's modules in a commit, by dotted name."""
    command = ["git", "archive", commit, PACKAGE]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py"):
                name = member.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                found[name] = archive.extractfile(member).read().decode()
    return found


def statements(texts, renamed):
    """Counts the statements of modules, as texts that do not say where they lie."""
    found, imports = collections.Counter(), set()
    for text in texts.values():
        tree = ast.parse(text)
        names, modules = {}, set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                for alias in node.names:
                    local = alias.asname or alias.name
                    if f"{node.module}.{alias.name}" in texts:
                        modules.add(local)
                    names[local] = alias.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                source = getattr(node, "module", None)
                imports |= {f"imports {source} {alias.name}" for alias in node.names}
        without = _WithoutPlaces(names, modules, renamed)
        for place, node in enumerate(tree.body):
            is_docstring = not place and isinstance(node, ast.Expr)
            if not is_docstring and (kept := without.visit(node)) is not None:
                found[ast.unparse(kept)] += 1
    return found + collections.Counter(imports)


class _WithoutPlaces(ast.NodeTransformer):
    """Drops imports of the package, and names of its modules before a dot."""

    def __init__(self, names, modules, renamed):
        self.names, self.modules, self.renamed = names, modules, renamed

    def visit_Import(self, node):
        return None

    visit_ImportFrom = visit_Import

    def visit_If(self, node):
        self.generic_visit(node)
        node.body = node.body or ([ast.Pass()] if node.orelse else [])
        return node if node.body else None

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(self.renamed.get(node.attr, node.attr), node.ctx)
        return node

    def visit_Name(self, node):
        name = self.names.get(node.id, node.id) if node.id not in self.modules else node.id
        node.id = self.renamed.get(name, name)
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.name = self.renamed.get(node.name, node.name)
        return node

    visit_ClassDef = visit_FunctionDef


def differences(old, new):
    """The statements whose numbers differ; a constant of two merged modules is there once."""
    merged = {one for one in old if 0 < new[one] < old[one] and _is_constant(one)}
    return {one for one in old.keys() | new.keys() if old[one] != new[one]} - merged


def _is_constant(text):
    node = ast.parse(text).body[0]
    return isinstance(node, ast.Assign | ast.AnnAssign)


def main(before, after, *renamed):
    new_names = dict(one.split("=") for one in renamed)
    old, new = statements(sources(before), {}), statements(sources(after), new_names)
    apart = differences(old, new)
    for one in sorted(apart):
        print("-" if one in old else "+", one.replace("\n", "\n  ")[:2000])
    print(f"{old.total():,} and {new.total():,} statements, of which {len(apart)} differ")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
