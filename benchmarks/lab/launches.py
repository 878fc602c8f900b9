"""Runs what is asked for, launch by launch, and keeps what comes of it."""

import itertools
import json
import math
import os
import subprocess
import sys

from keras_psplus import planning
from lab import ideal, job, names, wire, work
from tests.lab import netlab

# Roughly, seconds of a step's computing on a core. Only to choose how many steps to take.
_STEP_SECONDS = {"dense": 0.05, "sparse": 0.015, "convolutional": 0.05, "transformer": 0.05}
# Steps of each worker that are timed together if workers wait for nobody.
_WAITING_FOR_NOBODY = {"dense": 3, "sparse": 10, "convolutional": 10, "transformer": 10}
_ROUNDS = 2
_LONG_WINDOW = 5.0  # seconds; of such, one has to do
_MOST_WINDOWS = 60
# Synchronous parameter servers choose by their first steps at a rate whether these overlap.
_STEPS_TO_CHOOSE = 40
# What is run for a library, if not TensorFlow's; `args` may have another Python for it.
_MODULES = {"torch": "lab.torch_task", "jax": "lab.jax_task"}


def plan(method, name, size, workers, ps, rates, seconds, uplink=None, window=None):
    """Plan of a job's training, as of `meter.Meter`.

    Args:
        method: `methods.Method`.
        name: Of the work.
        size: A key of `work.SIZES`.
        workers: Number of workers.
        ps: Number of parameter servers.
        rates: As of `wire.parse_rate`.
        seconds: About as many for each phase.
        uplink: Rate of the racks' links to each other, or None.
        window: Steps of each worker that are timed together if workers wait for nobody, or None.
    """
    traits = method.traits
    asked = window
    link_bytes = ideal.busiest(traits, work.SIZES[size][name], workers, ps)
    compute = _STEP_SECONDS[name] * max(1, workers / len(os.sched_getaffinity(0)))
    window = math.lcm(traits.every, traits.together)
    if not traits.waits:
        window = asked or _WAITING_FOR_NOBODY[name]
        if traits.every > 1:
            # The end of an epoch, which ends a window, ends a round as well.
            window = traits.every * max(_ROUNDS, -(-window // traits.every))
    phases = []
    for rate in rates:
        bits = min(
            (b for b in (wire.parse_rate(rate), wire.parse_rate(uplink or "loopback")) if b),
            default=None,
        )
        step = planning.floor_ms(1000 * compute, link_bytes, bits) / 1000
        least = 3 if window == 1 else 2 - (step * window > _LONG_WINDOW)
        count = max(least, min(_MOST_WINDOWS, round(seconds / (step * window))))
        # A connection takes a while to find a new rate.
        warmup = 3 if step * window < 0.3 else 1
        if traits.path == "parameter_server" and traits.waits:
            warmup = _STEPS_TO_CHOOSE
        phases.append({"rate": rate, "warmup": warmup, "windows": count})
    return {
        "name": name,
        "window": window,
        "together": traits.together,
        "dynamic": method.dynamic,
        "start": 3 if window == 1 else 1,
        "phases": phases,
    }


def missing(document, methods, works, workers, rates, turns):
    """Yields the launches that the document lacks: turn, workers, method, and rates by work."""
    for turn, count, method in itertools.product(range(turns), workers, methods):
        # What sends nothing takes as long at any rate.
        rates_here = ["loopback"] if method.traits.path == "alone" else rates
        left = {}
        for name in works:
            if name in method.works:
                key = {"turn": turn, "work": name, "workers": count}
                key |= {"library": method.library, "method": method.name}
                left[name] = [r for r in rates_here if not document.done(**key, rate=r)]
        left = {name: rates_left for name, rates_left in left.items() if rates_left}
        if method.traits.path == "alone":
            for name in left:
                yield turn, count, method, {name: left[name]}
        elif left:
            yield turn, count, method, left


def measure(args, make_lab, method, workers, rates_by_work):
    """Measures one method; returns a result or an error for each work and rate.

    The works are trained one after the other by the same tasks. After a failure, the remaining
    works get new tasks.
    """
    left, results = dict(rates_by_work), []
    while left:
        try:
            found, error = _launch(args, make_lab, method, workers, left)
        except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
            # Of the lab itself; the next launch may fare better.
            found, error = [], f"{type(problem).__name__}: {problem}"
        for result in found:
            rates = left[result["work"]]
            rates.remove(result["rate"])
            results.append(result)
        left = {name: rates for name, rates in left.items() if rates}
        if error is None and left:
            error = "it ended without figures"
        if left:
            name = next(iter(left))
            results += [{"work": name, "rate": rate, "error": error} for rate in left.pop(name)]
    return results


def _launch(args, make_lab, method, workers, rates_by_work):
    jobs = method.jobs(workers, args.ps)
    leader = jobs.index("chief") if "chief" in jobs else 0
    path = method.traits.path
    # Under parameter servers, the chief alone knows of steps.
    trainers = [leader] if path == "parameter_server" else list(range(workers))
    description = {
        "library": method.library,
        "name": method.name,
        "path": path,
        "waits": method.traits.waits,
        "jobs": jobs,
        "trainers": trainers,
        "size": args.size,
        "plans": [
            plan(
                method,
                name,
                args.size,
                workers,
                args.ps,
                rates,
                args.seconds,
                args.uplink,
                args.window,
            )
            for name, rates in rates_by_work.items()
        ],
    }
    python = getattr(args, method.library, None) or sys.executable
    module = _MODULES.get(method.library, "lab.tensorflow_task")
    with make_lab(len(jobs)) as lab:
        description["addresses"] = [lab.address(rank) for rank in range(len(jobs))]
        commands = [
            [python, "-m", module, json.dumps({**description, "rank": rank})]
            for rank in range(len(jobs))
        ]
        if method.library == "jax" and isinstance(lab, netlab.Lab):
            commands = [names.resolving(c, lab.address(r)) for r, c in enumerate(commands)]
        return job.run(lab, commands, args.timeout, leader)


def run(args, document, make_lab, methods, works, log):
    """Measures all that the document lacks.

    Args:
        args: The command line's: `workers`, `rates`, `turns`, `ps`, `size`, `seconds`, `timeout`,
            `torch` and `jax`.
        document: `document.Document`.
        make_lab: Function from a number of hosts to a lab.
        methods: List of `methods.Method`.
        works: Names of works.
        log: Function that shows a line.
    """
    todo = list(missing(document, methods, works, args.workers, args.rates, args.turns))
    for number, (turn, workers, method, rates_by_work) in enumerate(todo, 1):
        load = os.getloadavg()[0]  # Other work on the machine would show here.
        results = measure(args, make_lab, method, workers, rates_by_work)
        common = {"turn": turn, "workers": workers, "library": method.library}
        common |= {"method": method.name, "load": load}
        for result in results:
            size = work.SIZES[args.size][result["work"]]
            result.update(common, links=ideal.links(method.traits, size, workers, args.ps))
            result["path"] = method.traits.path
        document.add(results)
        for result in results:
            figures = f"{len(result['times'])} windows" if "times" in result else "FAILED"
            if "times" in result:
                middle = sorted(result["times"])[len(result["times"]) // 2]
                figures = f"{middle:.1f} ms, {figures}"
            log(
                f"[{number}/{len(todo)}] {method.full_name}, {workers} workers, {result['work']}, "
                f"{result['rate']}: {figures}, load {load:.1f}"
            )
