"""Size and shape of the package: `make structure` prints them, test_structure.py holds them.

Reads the files only; imports nothing of the package.
"""

import ast
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "keras_psplus"
MODULES_PER_FOLDER = 20
LINES_PER_FILE = 700


@functools.cache
def trees():
    """The package's files, parsed, by their paths."""
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def is_for_types(node):
    """Whether it is what `if TYPE_CHECKING` tests."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def modules():
    """Paths of the package's files by the modules' dotted names."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def lines(paths):
    """Numbers of lines by file, relative to the repository."""
    return {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in paths}


def folders():
    """Numbers of modules by folder, without `__init__.py`."""
    found = {}
    for path in modules().values():
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT))
            found[folder] = found.get(folder, 0) + 1
    return found


def imports(with_types):
    """The modules of the package that each module imports when it is loaded.

    Args:
        with_types: Bool, whether imports under `if TYPE_CHECKING:` count.
    """
    known = modules()
    return {
        name: set(_imported(trees()[path].body, known, with_types)) - {name}
        for name, path in known.items()
    }


def _imported(body, known, with_types):
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` loads the module; its package's names are none of ours.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (n if n in known else node.module for n in names if node.module in known)
        elif isinstance(node, ast.If):
            if with_types or not is_for_types(node):
                yield from _imported(node.body, known, with_types)
            yield from _imported(node.orelse, known, with_types)
        elif isinstance(node, ast.Try | ast.ClassDef | ast.With):
            yield from _imported(node.body, known, with_types)


def circles(with_types):
    """Groups of modules that import one another, the largest first (Tarjan's components)."""
    graph = imports(with_types)
    number, low, stack, found = {}, {}, [], []

    def visit(name):
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in number:
            visit(name)
    return sorted(found, key=len, reverse=True)


def public_names():
    """Names in `__all__` of the package and of the modules that it offers."""
    found = {}
    for name in ("", "compression", "updates", "callbacks"):
        tree = ast.parse(modules()[f"{PACKAGE}.{name}".rstrip(".")].read_text())
        for node in tree.body:
            targets = [ast.unparse(t) for t in getattr(node, "targets", ())]
            if targets == ["__all__"] or (not name and targets == ["_EXPORTS"]):
                elements = getattr(node.value, "keys", None) or node.value.elts
                words = [e.value for e in elements if isinstance(e, ast.Constant)]
                found.setdefault(name or PACKAGE, []).extend(words)
    return found


def hooks():
    """Numbers of entries in `keras_hooks/` by file: calls of `Hook(...)`."""
    found = {}
    for path in sorted((ROOT / PACKAGE / "keras_hooks").glob("*.py")):
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Hook"
        ]
        if calls and path.name != "hook.py":
            found[path.name] = len(calls)
    return found


def main():
    sizes = lines(modules().values())
    print(f"{sum(sizes.values()):,} lines in {len(sizes)} files of {PACKAGE}/")
    long = {name: size for name, size in sizes.items() if size > LINES_PER_FILE}
    _print(f"{len(long)} files of more than {LINES_PER_FILE} lines", long)
    full = {name: count for name, count in folders().items() if count > MODULES_PER_FOLDER}
    _print(f"{len(full)} folders of more than {MODULES_PER_FOLDER} modules", full)
    for with_types in False, True:
        found = circles(with_types)
        title = "counting imports of types" if with_types else "at run time"
        print(f"\n{len(found)} circles of imports {title}")
        for circle in found:
            print(
                f"  {len(circle):4} {', '.join(n.removeprefix(PACKAGE + '.') for n in circle[:8])}"
            )
    _print(f"{sum(hooks().values())} replaced functions of Keras", hooks())
    _print("public names", {name: len(words) for name, words in public_names().items()})


def _print(title, counts):
    print(f"\n{title}")
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {count:5} {name}")


if __name__ == "__main__":
    main()
