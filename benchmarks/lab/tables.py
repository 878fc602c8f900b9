"""Figures as Markdown."""

from lab.figures import speed
from lab.methods import TITLES
from lab.short_tables import short

_BUSY = 3  # times the number of cores; the launches before leave a load, too
_LAST_LINES = 12  # of the log of what failed


def conditions(content):
    """A paragraph on the machine, the versions and the settings."""
    machine, settings = content["machine"], content["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    links = {
        "namespaces": "emulated hosts, each with its own link, "
        f"{settings['delay']:g} ms from host to host beside what the machine takes",
        "loopback": "**no emulated links**: all tasks on one loopback, whose bytes are divided "
        "by the number of workers",
    }[settings["links"]]
    if settings.get("racks", 1) > 1:
        links += f", in {settings['racks']} racks that {settings['uplink']} joins"
    loads = sorted(r["load"] for r in content["results"])
    middle = loads[len(loads) // 2] if loads else 0.0
    load = f"; load before a launch: {middle:.1f} (median)"
    if middle > _BUSY * machine["cores"]:
        load += ". **The machine was busy with other work**: times are worth little, bytes hold"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}; {versions}; {links}; {settings['ps']} parameter servers where there "
        f"are any{load}."
    )


def times(rows, work, workers):
    """Milliseconds of a step, a row for each method and three columns for each rate."""
    chosen = [row for row in rows if (row.work, row.workers) == (work, workers)]
    rates = {row.rate for row in chosen if row.path != "alone"} or {row.rate for row in chosen}
    rates = sorted(rates, key=speed)
    heads = " | ".join(f"{rate}: ms | 10 to 90 % | of alone | of floor" for rate in rates)
    lines = [f"| | method | {heads} |", "|---|---" + "|---:" * (4 * len(rates)) + "|"]
    for group in _by_method(chosen).values():
        cells = [TITLES[group[0].library], f"`{group[0].method}`"]
        at = {row.rate: row for row in group}
        for rate in rates:
            # What sends nothing takes as long at any rate.
            cells += _timed(group[0] if group[0].path == "alone" else at.get(rate))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _timed(row):
    if row is None:
        return [""] * 4
    if row.error:
        return ["failed", "", "", ""]
    ratios = [f"{ratio:.2f}" if ratio else "" for ratio in (row.of_alone, row.of_floor)]
    return [f"{row.median:.1f}", f"{row.low:.1f} to {row.high:.1f}", *ratios]


def sizes(rows, work):
    """Megabytes and the processor's milliseconds of a step, at the slowest rate of each method."""
    chosen = [row for row in rows if row.work == work and row.median is not None]
    lines = [
        "| workers | | method | worker: sent | received | fewest | library's count "
        "| ps: sent | received | ms processor: worker | ps |",
        "|---:|---|---" + "|---:" * 8 + "|",
    ]
    for group in _by_method(chosen).values():
        row = min(group, key=lambda row: speed(row.rate))
        if row.path == "alone":
            continue
        cells = [row.workers, TITLES[row.library], f"`{row.method}`"]
        sent, received = row.bytes["sent"], row.bytes["received"]
        cells += [_mb(sent.get("worker")), _mb(received.get("worker"))]
        # Of a worker's two directions the larger; what a library counts is what a worker sends,
        # but under parameter servers what all tasks send.
        cells.append(_mb(max(row.ideal["worker"])))
        cells.append(_mb(row.counted) if row.path == "all_reduce" else "")
        cells += [_mb(sent.get("ps")), _mb(received.get("ps"))]
        cells += [_ms(row.processor.get("worker")), _ms(row.processor.get("ps"))]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def uplinks(rows, work):
    """Milliseconds of a step and megabytes between racks, beside those of one ring of all."""
    chosen = [row for row in rows if row.work == work and row.uplink is not None]
    flat = {
        (row.workers, row.rate): row
        for row in chosen
        if (row.library, row.method) == ("keras_psplus", "all_reduce")
    }
    lines = [
        "| workers | | method | rate in a rack | ms | of one ring's | MB between racks "
        "| of one ring's |",
        "|---:|---|---" + "|---:" * 5 + "|",
    ]
    for row in chosen:
        ring = flat.get((row.workers, row.rate))
        ratios = ["", ""]
        if ring is not None:
            ratios = [f"{row.median / ring.median:.2f}", f"{row.uplink / ring.uplink:.2f}"]
        cells = [row.workers, TITLES[row.library], f"`{row.method}`", row.rate]
        cells += [f"{row.median:.1f}", ratios[0], _mb(row.uplink), ratios[1]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def failures(rows):
    """Failures, with the end of a log; empty if there were none."""
    seen, parts = set(), []
    for row in rows:
        key = (row.library, row.method, row.work, row.workers, row.error)
        if row.error and key not in seen:
            seen.add(key)
            log = "\n".join("    " + line for line in row.error.splitlines()[-_LAST_LINES:])
            title = f"{row.library}/{row.method}, {row.work}, {row.workers} workers"
            parts.append(f"**{title}** failed:\n\n{log}")
    return "\n\n".join(parts)


def report(rows, content):
    """Dict from a name to its piece of Markdown.

    Names are `conditions`, `failures`, and of each work its own (`dense`), and `short_dense`.
    """
    pieces = {"conditions": conditions(content)}
    for work in dict.fromkeys(row.work for row in rows):
        parts = []
        for workers in sorted({row.workers for row in rows if row.work == work}):
            parts.append(f"**{workers} workers**\n\n{times(rows, work, workers)}")
        parts.append(f"**Megabytes of a step**\n\n{sizes(rows, work)}")
        if any(row.work == work and row.uplink is not None for row in rows):
            parts.append(f"**Between racks**\n\n{uplinks(rows, work)}")
        pieces[work] = "\n\n".join(parts)
        pieces[f"short_{work}"] = short(rows, work)
    pieces["failures"] = failures(rows) or "None failed."
    return pieces


def drawings(files):
    """Pictures of step times, from a dict from their files to what they show."""
    times = {path.name: title for path, title in files.items() if "quality" not in path.name}
    return "\n\n".join(f"![{title}]({name})" for name, title in times.items())


def put_in_place(text, pieces):
    """Puts pieces between their marks, `<!-- lab: NAME -->` and `<!-- /lab: NAME -->`.

    Raises:
        ValueError: If a piece has no marks in the text.
    """
    for name, piece in pieces.items():
        begin, end = f"<!-- lab: {name} -->\n", f"<!-- /lab: {name} -->"
        if begin not in text or end not in text.partition(begin)[2]:
            raise ValueError(f"The text has no place for {name!r}. Received: no {begin.strip()!r}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{piece}\n\n{end}{rest.partition(end)[2]}"
    return text


def _by_method(rows):
    groups = {}
    for row in rows:
        groups.setdefault((row.workers, row.library, row.method), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: item[0][0]))


def _mb(count):
    return "" if count is None else f"{count / 1e6:.3f}"


def _ms(number):
    return "" if number is None else f"{number:.1f}"
