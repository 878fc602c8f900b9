"""The benchmark lab: every entry on the same work, over equal links.

    python benchmarks/bench.py --quick
    sudo python benchmarks/bench.py --torch PYTHON_WITH_TORCH --jax PYTHON_WITH_JAX --docs

Runs every entry of the catalogue, and what is installed of tf_keras (under TensorFlow's own
strategies), PyTorch (DDP) and JAX (`keras.distribution.DataParallel`), as tasks on emulated hosts
of this machine, each on one processor core. Figures go to a JSON file at once; what the file holds
is not measured again, so that a run that was interrupted goes on. A table and, with matplotlib,
drawings are made from the file.

Emulated hosts need root. Without it, tasks share the loopback, which has no limit.
"""

import argparse
import functools
import importlib.util
import os
import pathlib
import sys
import time

import fidelity
from lab import document, figures, loopback, manual, methods, tables, wire, work

from tests.lab import netlab

QUICK = {
    "works": ["dense"],
    "workers": [2],
    "rates": ["1gbit", "100mbit"],
    "seconds": 0.5,
    "only": [
        "keras_psplus/all_reduce",
        "keras_psplus/all_reduce_int8",
        "keras_psplus/all_reduce_powersgd",
        "keras_psplus/diloco",
        "tf_keras/all_reduce",
        "torch/ddp",
        "torch/ddp_powersgd_4",
        "jax/data_parallel",
    ],
}
FULL = {
    "works": ["dense", "sparse"],
    "workers": [2, 4],
    "rates": ["loopback", "1gbit", "100mbit"],
    "seconds": 1.0,
    "only": [],
}
SMALL_FIDELITY = ("digits", ["none", "bf16", "int8", "sign", "topk:0.01", "powersgd:4"], [1])


def parse(argv=None):
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few methods, 2 workers; under three minutes"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="methods, as 'diloco' or 'torch/*'"
    )
    parser.add_argument("--works", nargs="+", choices=work.SIZES["full"], help="what is trained")
    parser.add_argument("--workers", nargs="+", type=int, metavar="N")
    parser.add_argument(
        "--rates", nargs="+", metavar="RATE", help="as 100mbit, 1gbit, loopback (no limit)"
    )
    parser.add_argument(
        "--delay", type=float, default=0.0, help="ms from host to host, beside the machine's"
    )
    parser.add_argument(
        "--racks", type=int, default=1, metavar="N", help="racks that hosts are divided among"
    )
    parser.add_argument(
        "--uplink",
        metavar="RATE",
        help="of each rack's link to the others, which its hosts share (default: 100mbit)",
    )
    parser.add_argument("--ps", type=int, default=2, help="parameter servers, for what needs them")
    parser.add_argument("--seconds", type=float, help="about so long for each figure")
    parser.add_argument(
        "--window",
        type=int,
        metavar="STEPS",
        help="steps of each worker, an epoch, that are timed together if workers wait for nobody "
        "(default: 3 or 10); the first one's read and the last one's gradients are alone in it",
    )
    parser.add_argument("--turns", type=int, default=1, help="how often to measure everything")
    parser.add_argument("--size", choices=work.SIZES, default="full", help="of the models")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for each launch")
    parser.add_argument(
        "--torch", metavar="PYTHON", help="a Python with PyTorch, if this one has none"
    )
    parser.add_argument(
        "--jax", metavar="PYTHON", help="a Python with JAX and Keras, if this one has no JAX"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="no emulated hosts, even if they can be made"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("bench.json"), help="the JSON file"
    )
    parser.add_argument("--fresh", action="store_true", help="leave out what the file holds")
    parser.add_argument(
        "--list", action="store_true", help="show the methods that are chosen, and end"
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, only report on the file"
    )
    parser.add_argument(
        "--docs", action="store_true", help="put tables and drawings into docs/ as well"
    )
    parser.add_argument(
        "--fidelity", type=pathlib.Path, metavar="JSONL", help="results of fidelity.py, to draw"
    )
    parser.add_argument(
        "--run_fidelity",
        "--run-fidelity",
        action="store_true",
        help="train a small set for that file first",
    )
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.run_fidelity and args.fidelity is None:
        args.fidelity = args.out.with_name(args.out.stem + "_fidelity.jsonl")
    try:
        for rate in args.rates:
            wire.parse_rate(rate)
        if args.racks > 1:
            args.uplink = args.uplink or "100mbit"
            wire.parse_rate(args.uplink)
    except ValueError as error:
        parser.error(str(error))
    if min([args.ps, args.turns, args.racks, args.window or 1, *args.workers]) < 1:
        parser.error("--workers, --racks, --ps, --window and --turns must be at least 1")
    if args.racks == 1 and args.uplink:
        parser.error(f"--uplink is of racks: give --racks as well. Received: {args.uplink}")
    if args.racks > min(args.workers):
        parser.error(
            "each rack needs a worker. "
            f"Received: --racks {args.racks} --workers {min(args.workers)}"
        )
    return args, parser


def choose(args):
    """The methods that are asked for and can be run here."""
    everything = methods.catalogue()
    if importlib.util.find_spec("tf_keras"):
        everything += methods.tf_keras()
    else:
        log("tf_keras is not installed and is left out: pip install tf_keras")
    if args.torch:
        everything += methods.torch()
    else:
        log("PyTorch is not installed and is left out: give --torch a Python that has it")
    if args.jax:
        everything += methods.jax()
    else:
        log("JAX is not installed and is left out: give --jax a Python that has it, and Keras")
    if args.racks == 1:
        everything = [method for method in everything if not method.traits.needs_racks]
    patterns = args.only
    if patterns is QUICK["only"]:
        installed = {method.library for method in everything}
        patterns = [pattern for pattern in patterns if pattern.partition("/")[0] in installed]
    return methods.select(everything, patterns)


def links(args):
    """Kind of hosts, `"namespaces"` or `"loopback"`, and a function that makes them."""
    problem = "--loopback" if args.loopback else netlab.why_not(rate=1e9, delay=args.delay / 1e3)
    if problem is None:
        uplink = wire.parse_rate(args.uplink) if args.racks > 1 else None
        options = {"delay": args.delay / 1e3, "racks": args.racks, "uplink": uplink}
        return "namespaces", functools.partial(netlab.Lab, **options)
    log(
        "No emulated hosts: all tasks share this machine's loopback, without any limit. To emulate "
        f"links, run as root, with iproute2 and util-linux. Received: {problem}"
    )
    args.rates, args.delay, args.racks, args.uplink = ["loopback"], 0.0, 1, None
    return "loopback", loopback.Loopback


def measure(args):
    """Measures what the file lacks."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Not above: a Python that has no TensorFlow can report, too.
    from lab import launches

    chosen = choose(args)
    if args.list:
        print("\n".join(f"{method.full_name:<44}{method.traits.path}" for method in chosen))
        return
    kind, make_lab = links(args)
    settings = {"size": args.size, "ps": args.ps, "delay": args.delay, "links": kind}
    settings |= {"racks": args.racks, "uplink": args.uplink, "window": args.window}
    libraries = {method.library for method in chosen}
    pythons = {name: getattr(args, name) for name in ("torch", "jax") if name in libraries}
    file = document.Document(args.out, settings, pythons, args.fresh)
    launches.run(args, file, make_lab, chosen, args.works, log)


def report(args):
    """Writes the table and the drawings that the file's figures give."""
    content = document.read(args.out)
    rows = figures.rows(content["results"])
    pieces = tables.report(rows, content)
    text = args.out.with_suffix(".md")
    text.write_text("\n\n".join(f"## {name}\n\n{piece}" for name, piece in pieces.items()) + "\n")
    log(f"table: {text}")
    if importlib.util.find_spec("matplotlib"):
        from lab import plots

        drawn = plots.draw(rows, points(args.fidelity), args.out.parent)
        log(f"drawings: {', '.join(map(str, drawn))}")
        pieces["drawings"] = tables.drawings(drawn)
    else:
        drawn = []
        log(
            "No drawings without matplotlib: pip install matplotlib, or run this again with "
            "--report and a Python that has it"
        )
    if args.docs:
        # Those of the manual are of its tables, which may have more than this file.
        pieces.pop("drawings", None)
        manual.put(pieces)
        log(f"put into {manual.DOCS}: {', '.join(pieces)}")
        if drawn:
            import redraw

            redraw.main()
            log("the manual's drawings and short tables are those of its long tables again")
        log(
            "To be changed by hand: the date of README.md, and the dates, the commit and the "
            "sentences of docs/benchmarks.md"
        )


def points(path):
    """Quality beside bytes of the tasks of a file of fidelity.py, or nothing without one."""
    if path is None:
        return {}
    results, found = fidelity.read(path), {}
    for task, (title, metric, _) in fidelity.EXPERIMENTS.items():
        of_task = [result for result in results if result["task"] == task]
        key = title, fidelity.UNITS[metric]
        found[key] = figures.learnt(of_task, metric, fidelity.loss_of)
    return found


def log(line):
    print(line, file=sys.stderr, flush=True)


def main(argv=None):
    args, parser = parse(argv)
    for library in ("torch", "jax"):
        if getattr(args, library) is None and importlib.util.find_spec(library):
            setattr(args, library, sys.executable)
    begin = time.monotonic()
    try:
        if not args.report:
            measure(args)
        if args.list:
            return
        if args.run_fidelity:
            task, compressions, seeds = SMALL_FIDELITY
            fidelity.run([task], compressions, seeds, args.fidelity, args.timeout)
        report(args)
    except ValueError as error:
        parser.error(str(error))
    log(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
