"""Figures as drawings, SVG: step time by bandwidth, scaling by workers, quality by bytes.

They have no background, and colours that show on a light and on a dark page, and differ also for
those who see few colours (like those of Okabe and Ito, with a marker each).
"""

import pathlib

import matplotlib
from matplotlib import pyplot, ticker
from matplotlib.lines import Line2D

from lab.figures import speed
from lab.methods import TITLES

_TEXT = "#808080"
matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",  # text as text keeps the files small
        "svg.hashsalt": "keras_psplus",  # the same figures give the same file
        "font.size": 9,
        "font.family": "sans-serif",
        "savefig.transparent": True,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT
        ),
        "grid.color": _TEXT,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)
_COLOURS = {
    "keras_psplus": "#2b8ac6",
    "tf_keras": "#c77700",
    "torch": "#c4609c",
    "jax": "#009e73",
}
_SHADES = ("#2b8ac6", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
_MARKERS = "osD^v"


def step_time(rows, work, workers, path):
    """Draws every method's step time at every rate, with the floor of each.

    Args:
        rows: Of `figures.rows`.
        work: Name of the work.
        workers: Number of workers.
        path: The file.
    """
    rows = [r for r in rows if (r.work, r.workers) == (work, workers) and r.median is not None]
    if not rows:
        return False
    rates = sorted({row.rate for row in rows}, key=speed)
    places = _places(rows, "median")
    figure, axes = pyplot.subplots(figsize=(8, 1.3 + 0.21 * len(places)), layout="constrained")
    for row in rows:
        place = places[row.library, row.method]
        mark = _mark(rates.index(row.rate))
        colour = mark["color"]
        axes.plot([row.low, row.high], [place, place], color=colour, alpha=0.4, linewidth=3)
        axes.plot(row.median, place, **mark)
        if row.floor:
            axes.plot(row.floor, place, "|", color=colour, markersize=9)
    _name_methods(axes, places)
    _logarithmic(axes.xaxis)
    axes.set_xlabel("milliseconds a step (logarithmic): median, and 10 to 90 % of steps")
    axes.set_ylabel("library and method")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"{work.capitalize()} model, {workers} workers", loc="left")
    handles = [
        Line2D([], [], ls="", label=rate, **_mark(number)) for number, rate in enumerate(rates)
    ]
    handles.append(
        Line2D([], [], color=_TEXT, marker="|", ls="", label="floor: fewest bytes over the link")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path)
    return True


def scaling(rows, work, path):
    """Draws how much of the speed without communication is left, by the number of workers."""
    rows = [r for r in rows if r.work == work and r.of_alone and r.path != "alone"]
    if len({row.workers for row in rows}) < 2:
        return False
    rates = sorted({row.rate for row in rows}, key=speed)
    counts = sorted({row.workers for row in rows})
    places = _places(rows, "of_alone")
    size = (2 + 2 * len(rates), 1.3 + 0.21 * len(places))
    figure, all_axes = pyplot.subplots(
        1, len(rates), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, rate in zip(all_axes[0], rates):
        for key, place in places.items():
            points = {
                row.workers: 100 / row.of_alone
                for row in rows
                if (row.library, row.method) == key and row.rate == rate
            }
            axes.plot(points.values(), [place] * len(points), color=_TEXT, alpha=0.5, zorder=1)
            for workers, percent in points.items():
                axes.plot(percent, place, **_mark(counts.index(workers)))
        axes.set_title(rate, loc="left")
        axes.set_xlabel("% of the speed alone")
        low, high = axes.get_xlim()
        _logarithmic(axes.xaxis, (1,) if high > 30 * max(low, 0.1) else (1, 2, 5))
        axes.grid(axis="x", alpha=0.3)
    _name_methods(all_axes[0, 0], places)
    all_axes[0, 0].set_ylabel("library and method")
    handles = [
        Line2D([], [], ls="", label=f"{workers} workers", **_mark(number))
        for number, workers in enumerate(counts)
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(counts), frameon=False)
    figure.suptitle(f"{work.capitalize()} model", x=0.01, ha="left")
    _save(figure, path)
    return True


def quality(points_of_tasks, path):
    """Draws the quality lost against exact training by the bytes sent.

    Args:
        points_of_tasks: Dict from a task's title and the unit of its differences to what
            `figures.learnt` returns.
        path: The file.
    """
    points_of_tasks = {title: points for title, points in points_of_tasks.items() if points}
    if not points_of_tasks:
        return False
    counts = [len(points) for points in points_of_tasks.values()]
    figure, all_axes = pyplot.subplots(
        len(counts),
        1,
        figsize=(8, 1.1 * len(counts) + 0.2 * sum(counts)),
        squeeze=False,
        height_ratios=[count + 1 for count in counts],
        layout="constrained",
    )
    for axes, ((title, unit), points) in zip(all_axes[:, 0], points_of_tasks.items()):
        axes.axvline(0, color=_TEXT, linewidth=0.9)
        # The fewest bytes at the bottom.
        names = sorted(points, key=lambda name: -points[name][0])
        for place, name in enumerate(names):
            difference = points[name][1]
            axes.plot([0, difference], [place, place], color=_SHADES[0], alpha=0.4, linewidth=3)
            axes.plot(difference, place, "o", color=_COLOURS["keras_psplus"], markersize=5)
        labels = [f"{name}: {points[name][0]:.3g} x fewer bytes" for name in names]
        axes.set_yticks(range(len(names)), labels, fontsize=8)
        axes.set_ylim(-0.7, len(names) - 0.3)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel(f"difference from exact training: {unit}", fontsize=8)
        axes.grid(axis="x", alpha=0.3)
    figure.supylabel("compressor, and how many times fewer bytes it sends", fontsize=8)
    _save(figure, path)
    return True


def draw(rows, points_of_tasks, folder):
    """Draws everything that there are figures for.

    Args:
        rows: Of `figures.rows`.
        points_of_tasks: As in `quality`.
        folder: Where the files go.

    Returns:
        Dict from files to what they show.
    """
    drawn = {}

    def file(name):
        return pathlib.Path(folder) / f"bench_{name}.svg"

    for name in dict.fromkeys(row.work for row in rows):
        for count in sorted({row.workers for row in rows}):
            path = file(f"{name}_{count}_workers")
            if step_time(rows, name, count, path):
                drawn[path] = f"Step time by bandwidth, {name} model, {count} workers"
        if scaling(rows, name, file(f"scaling_{name}")):
            drawn[file(f"scaling_{name}")] = f"Scaling by workers, {name} model"
    if quality(points_of_tasks, file("quality")):
        drawn[file("quality")] = "Difference from exact training, by bytes"
    return drawn


def _places(rows, figure):
    """Dict from library and method to their line: that with the largest figure on top."""
    largest = {}
    for row in rows:
        key = (row.library, row.method)
        largest[key] = max(largest.get(key, 0.0), getattr(row, figure))
    return {key: place for place, key in enumerate(sorted(largest, key=largest.get))}


def _name_methods(axes, places):
    names = [f"{TITLES[library]}  {method}" for library, method in places]
    axes.set_yticks(list(places.values()), names, fontsize=8)
    for label, (library, _) in zip(axes.get_yticklabels(), places):
        label.set_color(_COLOURS[library])


def _mark(number):
    return {
        "color": _SHADES[number % len(_SHADES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 5,
    }


def _logarithmic(axis, digits=(1, 2, 5)):
    """Gives an axis a logarithmic scale with plain numbers that begin with these digits."""
    {"x": axis.axes.set_xscale, "y": axis.axes.set_yscale}[axis.axis_name]("log")
    axis.set_major_locator(ticker.LogLocator(subs=digits))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _save(figure, path):
    figure.savefig(pathlib.Path(path), metadata={"Date": None})
    pyplot.close(figure)
