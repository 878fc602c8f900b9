"""What README.md and docs/*.md hold: code blocks, inline code, headings and links."""

import ast
import builtins
import dataclasses
import functools
import pathlib
import re

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Its commands and files make up one session, which `test_tutorial.py` runs.
TUTORIAL = ROOT / "docs" / "tutorial.md"

# A comment that is part of these tests; the built site does not show it.
_COMMENT = re.compile(r"<!-- *(python\n|program:|file:)(.*)--> *\n*", re.DOTALL)
_MISSPELT = re.compile(r"<!--\s*(python|program|file)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block, or a comment that stands for one.

    Args:
        page: The file.
        line: The line of the file after which the text begins.
        language: What stands behind the fence; `"shell"` if the block is indented.
        text: The code.
        hidden: Whether it is in a comment.
    """

    page: pathlib.Path
    line: int
    language: str
    text: str
    hidden: bool = False

    @property
    def name(self):
        """Where the block is, e.g. `"docs/hybrid.md:9"`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclasses.dataclass
class Program:
    """Python blocks that are run one after the other, as one script.

    Args:
        name: Where it begins, e.g. `"docs/hybrid.md:9"`.
        flags: The cluster it needs, as flags of `keras-psplus run`; `""` for one process.
        blocks: The blocks.
    """

    name: str
    flags: str
    blocks: list[Block]


@functools.cache
def tokens(page):
    """Returns a page's tokens, as `markdown_it` reads it."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline(page, kind):
    """Yields the tokens of one kind (`"code_inline"`, `"link_open"`, ...) within text."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type == kind:
                yield child


def blocks(page):
    """Returns a page's code blocks and what its comments hold for these tests, in order."""
    return [block for token in tokens(page) if (block := _block(page, token))]


def all_blocks():
    """Returns the blocks of all pages."""
    return [block for page in PAGES for block in blocks(page)]


def programs():
    """Returns the programs of all pages: a page is one, unless it says where others begin."""
    found = []
    for page in PAGES:
        if page == TUTORIAL:
            continue
        flags, begin = "", len(found)
        for block in blocks(page):
            if block.language == "program":
                flags, begin = block.text.strip(), len(found)
            elif block.language == "python":
                if len(found) == begin:
                    found.append(Program(block.name, flags, []))
                found[-1].blocks.append(block)
    return found


def names(block):
    """Names that a Python block binds somewhere, and those that it reads and does not bind."""
    bound, read = set(), set()
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return bound, read - bound - set(dir(builtins))


def shows(line, printed, position=0):
    """The match of a page's line in an output, from a position on; None if it is not there.

    `...` in it stands for anything within a line, and so does a space for several.
    """
    pattern = r"[^\n]*".join(
        r"\s+".join(map(re.escape, part.split(" "))) for part in line.split("...")
    )
    return re.compile(pattern).search(printed, position)


def _block(page, token):
    if token.type == "code_block":
        return Block(page, token.map[0], "shell", token.content)
    if token.type == "fence":
        return Block(page, token.map[0] + 1, token.info.strip(), token.content)
    if token.type != "html_block" or not token.content.startswith("<!--"):
        return None
    if found := _COMMENT.fullmatch(token.content):
        return Block(page, token.map[0] + 1, found[1].strip(":\n"), found[2], hidden=True)
    if _MISSPELT.match(token.content):
        raise ValueError(
            f"{page}, line {token.map[0] + 1}: hidden code is `<!-- python`, lines of code, and "
            "`-->` on a line of its own; a new program is `<!-- program: FLAGS -->`, a file of the "
            "tutorial `<!-- file: NAME -->`. "
            f"Received: {token.content}"
        )
    return None
