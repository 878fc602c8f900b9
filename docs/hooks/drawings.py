"""Draws the manual's Mermaid blocks as SVG while MkDocs builds the site.

The pages keep the text, which GitHub draws as well. The site has the drawing itself: it loads no
script, and colours are CSS variables of `stylesheets/extra.css`, so one drawing serves a light and
a dark page. What Mermaid cannot draw ends the build. Mermaid takes some ten seconds for each
drawing, most of the build: `.drawings/` keeps them for the next one.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import re

import mermaidx
from pymdownx.superfences import SuperFencesException

# Colours in which Mermaid draws, each for one variable: Mermaid computes with colours, and knows no
# variables.
_COLOURS = {
    "#010203": "line",
    "#040506": "text",
    "#070809": "fill",
    "#0a0b0c": "border",
    "#0d0e0f": "group",
    "#101112": "page",
}
_LINE, _TEXT, _FILL, _BORDER, _GROUP, _PAGE = _COLOURS
_THEME = {
    "fontFamily": "sans-serif",
    "fontSize": "15px",
    "background": _PAGE,
    "textColor": _TEXT,
    "titleColor": _TEXT,
    "lineColor": _LINE,
    "primaryColor": _FILL,
    "primaryTextColor": _TEXT,
    "primaryBorderColor": _BORDER,
    "nodeTextColor": _TEXT,
    "mainBkg": _FILL,
    "nodeBorder": _BORDER,
    "clusterBkg": _GROUP,
    "clusterBorder": _BORDER,
    "edgeLabelBackground": _PAGE,
    "arrowheadColor": _LINE,
    "actorBkg": _FILL,
    "actorBorder": _BORDER,
    "actorTextColor": _TEXT,
    "actorLineColor": _LINE,
    "signalColor": _LINE,
    "signalTextColor": _TEXT,
    "noteBkgColor": _GROUP,
    "noteBorderColor": _BORDER,
    "noteTextColor": _TEXT,
}
_SMALLEST = 0.6  # of its size, at which letters have 9 pixels
_KEPT = pathlib.Path(__file__).parents[2] / ".drawings"
_CONFIG = {
    "theme": "base",
    "themeVariables": _THEME,
    "htmlLabels": False,
    "flowchart": {
        "htmlLabels": False,
        "nodeSpacing": 32,
        "rankSpacing": 40,
        "padding": 12,
        "wrappingWidth": 400,
    },
    "sequence": {"mirrorActors": False, "actorMargin": 60, "width": 110},
}


def on_config(config):
    """Has each block of the language `mermaid` drawn."""
    fences = config["mdx_configs"].setdefault("pymdownx.superfences", {})
    fence = {"name": "mermaid", "class": "drawing", "format": draw}
    fences["custom_fences"] = [*fences.get("custom_fences", []), fence]
    return config


def draw(source, language, css_class, options, md, **kwargs):
    """The HTML of a block.

    Args:
        source: Its text.
        language, options, md, kwargs: Not used.
        css_class: That of the figure.

    Returns:
        A `figure` with an `svg`.

    Raises:
        SuperFencesException: If Mermaid cannot draw it.
    """
    try:
        svg = _svg(source)
    except Exception as error:
        raise SuperFencesException(f"Mermaid cannot draw this: {error}\n{source}") from error
    return f'<figure class="{css_class}">{in_page(svg, source)}</figure>'


def _svg(source):
    made_of = json.dumps([source, _CONFIG, importlib.metadata.version("mermaidx")])
    kept = _KEPT / f"{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.svg"
    if not kept.is_file():
        svg = mermaidx.render(source, theme="base", config=_CONFIG).svg()
        _KEPT.mkdir(exist_ok=True)
        kept.write_text(svg)
    return kept.read_text()


def in_page(svg, source):
    """Gives a drawing other names than those of the page's others, and the page's colours.

    Args:
        svg: As Mermaid has made it.
        source: The text, from which a name is made.
    """
    name = "drawing-" + hashlib.sha256(source.encode()).hexdigest()[:8]
    svg = svg[svg.index("<svg") :].replace("my-svg", name)
    for colour, variable in _COLOURS.items():
        svg = re.sub(colour, f"var(--drawing-{variable})", svg, flags=re.IGNORECASE)
    return re.sub(r"max-width: ([\d.]+)px", _widths, svg, count=1)


def _widths(found):
    """No larger than drawn, and no smaller than can be read: the page scrolls it."""
    return f"max-width: {found[1]}px; min-width: {_SMALLEST * float(found[1]):.0f}px"
