"""Figures as drawings, SVG: step time by bandwidth, scaling by workers, quality by bytes."""

import pathlib

import matplotlib
from matplotlib import pyplot
from matplotlib.lines import Line2D

from lab.figures import speed
from lab.methods import TITLES

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",  # text as text keeps the files small
        "svg.hashsalt": "keras_psplus",  # the same figures give the same file
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)
_COLOURS = {"keras_psplus": "#1b6ca8", "tf_keras": "#e08214", "torch": "#b2182b"}
_SHADES = ("#08519c", "#e6850e", "#969696", "#31a354", "#756bb1")
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
    slowest = {}
    for row in rows:
        name = f"{TITLES[row.library]}  {row.method}"
        slowest[name] = max(slowest.get(name, 0.0), row.median)
    places = {name: place for place, name in enumerate(sorted(slowest, key=slowest.get))}
    figure, axes = pyplot.subplots(figsize=(8, 1.3 + 0.21 * len(places)), layout="constrained")
    for row in rows:
        place = places[f"{TITLES[row.library]}  {row.method}"]
        colour = _SHADES[rates.index(row.rate) % len(_SHADES)]
        axes.plot([row.low, row.high], [place, place], color=colour, alpha=0.4, linewidth=3)
        marker = _MARKERS[rates.index(row.rate) % len(_MARKERS)]
        axes.plot(row.median, place, marker, color=colour, markersize=5)
        if row.floor:
            axes.plot(row.floor, place, "|", color=colour, markersize=9)
    axes.set_yticks(list(places.values()), list(places), fontsize=8)
    for label in axes.get_yticklabels():
        library = next(k for k, title in TITLES.items() if label.get_text().startswith(title + " "))
        label.set_color(_COLOURS[library])
    axes.set_xscale("log")
    axes.set_xlabel("ms for a step, median and 10 to 90 %")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"{work.capitalize()} model, {workers} workers", loc="left")
    handles = [
        Line2D([], [], color=_SHADES[i % len(_SHADES)], marker=_MARKERS[i % 5], ls="", label=rate)
        for i, rate in enumerate(rates)
    ]
    handles.append(Line2D([], [], color="black", marker="|", ls="", label="floor"))
    axes.legend(handles=handles, loc="lower right", frameon=False)
    _save(figure, path)
    return True


def scaling(rows, work, path):
    """Draws how much of the speed without communication is left, by the number of workers."""
    rows = [r for r in rows if r.work == work and r.of_alone and r.path != "alone"]
    if len({row.workers for row in rows}) < 2:
        return False
    rates = sorted({row.rate for row in rows}, key=speed)
    figure, all_axes = pyplot.subplots(
        1, len(rates), figsize=(2 + 3 * len(rates), 5), sharey=True, layout="constrained"
    )
    methods = list(dict.fromkeys((row.library, row.method) for row in rows))
    colours = pyplot.get_cmap("tab20").colors
    for axes, rate in zip([all_axes] if len(rates) == 1 else all_axes, rates):
        for number, key in enumerate(methods):
            points = sorted(
                (row.workers, 100 / row.of_alone)
                for row in rows
                if (row.library, row.method) == key and row.rate == rate
            )
            style = {"keras_psplus": "-", "tf_keras": ":", "torch": "--"}[key[0]]
            label = f"{TITLES[key[0]]}  {key[1]}"
            colour = colours[number % len(colours)]
            axes.plot(*zip(*points) if points else ([], []), style, color=colour, marker="o",
                      markersize=3, label=label)  # fmt: skip
        axes.set_title(rate, loc="left")
        axes.set_xticks(sorted({row.workers for row in rows}))
        axes.set_xlabel("workers")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.get_axes()[0].set_ylabel("% of the speed without communication")
    handles, labels = figure.get_axes()[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=7)
    figure.suptitle(f"{work.capitalize()} model", x=0.01, ha="left")
    _save(figure, path)
    return True


def quality(points_of_tasks, path):
    """Draws what is learnt beside how many bytes are sent.

    Args:
        points_of_tasks: Dict from a task's title and the unit of its differences to what
            `figures.learnt` returns.
        path: The file.
    """
    points_of_tasks = {title: points for title, points in points_of_tasks.items() if points}
    if not points_of_tasks:
        return False
    count = len(points_of_tasks)
    figure, all_axes = pyplot.subplots(
        count, 1, figsize=(8, 3.2 * count), squeeze=False, layout="constrained"
    )
    for axes, ((title, unit), points) in zip(all_axes[:, 0], points_of_tasks.items()):
        axes.axhline(0, color="black", linewidth=0.7)
        for name, (fewer, difference) in points.items():
            axes.plot(fewer, difference, "o", color=_COLOURS["keras_psplus"], markersize=4)
            axes.annotate(name, (fewer, difference), (3, 3), textcoords="offset points", fontsize=7)
        axes.set_xscale("log")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
    all_axes[-1, 0].set_xlabel("times fewer bytes than float32 at every step")
    _save(figure, path)
    return True


def _save(figure, path):
    figure.savefig(pathlib.Path(path), metadata={"Date": None})
    pyplot.close(figure)
