"""Draws the chart of the README from the lab's tables.

    python benchmarks/readme_chart.py

Text to SVG, without a library: no background, and colours that differ on a light and a dark
page, also by those who see few colours (blue and orange of Okabe and Ito).
"""

import pathlib
import re

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
CHART = DOCS / "bench_readme.svg"
TABLES = DOCS.parent / "benchmarks" / "results" / "tables.md"
# What is shown: the library and the method of the tables, and what a reader calls it.
BARS = [
    ("keras_psplus", "all_reduce", "MultiWorkerMirroredStrategy()"),
    ("keras_psplus", "all_reduce_factors", 'compression="factors" (exact)'),
    ("keras_psplus", "all_reduce_int8", 'compression="int8"'),
    ("keras_psplus", "all_reduce_powersgd", 'compression="powersgd:4"'),
    ("keras_psplus", "sync_parameter_server", 'ParameterServerStrategy(mode="sync")'),
    ("tf_keras", "all_reduce", "tf_keras, all-reduce"),
    ("tf_keras", "parameter_server", "tf_keras, parameter servers"),
    ("PyTorch", "ddp", "PyTorch DDP"),
    ("PyTorch", "ddp_powersgd_4", "PyTorch DDP, PowerSGD(4)"),
]
OURS, THEIRS, TEXT = "#0072b2", "#e69f00", "#808080"
LEFT, WIDTH, ROW, TOP = 250, 400, 26, 34


def milliseconds():
    """Steps of the dense model with two workers at 1 Gbit/s, by library and method."""
    page = TABLES.read_text()
    table = page.partition("## Dense model")[2].partition("**2 workers**")[2].split("\n\n")[1]
    names, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")
    )
    column = names.index("1gbit: ms")
    return {(row[0], row[1].strip("`")): float(row[column]) for row in rows}


def rounded(value):
    """An int; halves go up."""
    return int(value + 0.5)


def svg():
    """Returns the drawing."""
    found = milliseconds()
    bars = [bar for bar in BARS if bar[:2] in found]  # a short run has fewer
    longest = max(found[library, method] for library, method, _ in bars)
    height = TOP + ROW * len(bars) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 60} {height}" '
        f'font-family="sans-serif" font-size="13" fill="{TEXT}">',
        "<title>Milliseconds a step, two workers at 1 Gbit/s</title>",
        '<text x="8" y="18" font-weight="bold">Milliseconds a step, 4.95 million weights, two '
        "workers at 1 Gbit/s; shorter is better</text>",
    ]
    for number, (library, method, label) in enumerate(bars):
        value, y = found[library, method], TOP + ROW * number
        length = WIDTH * value / longest
        colour = OURS if library == "keras_psplus" else THEIRS
        label = re.sub('"', "&quot;", label)
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{y + 15}">{rounded(value)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    CHART.write_text(svg())
