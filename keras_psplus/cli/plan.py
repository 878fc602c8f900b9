"""`keras-psplus plan`: predicted costs of each entry for a script's model.

Needs no cluster. With `--stages`, the stages into which `PipelineStrategy` would cut it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
from typing import Any

from absl import flags

from keras_psplus.catalogue import automatic, entries, lookup
from keras_psplus.cli.flags import parsing
from keras_psplus.cli.planning import plan_links, plan_script
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.planning import choices
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.links_file import Links

_USAGE = """
usage: keras-psplus plan [flags] SCRIPT [arguments of the script]

Runs SCRIPT in one process, without a cluster, until it calls fit. There it measures some steps, and
prints what each entry of the catalogue would take of this model: milliseconds, bytes, speed-up over
one worker, what it loses. The recommended one comes first. What the script prints is shown if it
fails.

With --stages N it prints how PipelineStrategy would cut the model into N stages instead: layers,
memory, estimated times, bytes from stage to stage. Nothing is trained for that. Layers are measured
on this machine, unless the script says stages="flops".

  keras-psplus plan --workers 4 --ps 2 --link 1gbit train.py
  keras-psplus plan --workers 1024 --link 10gbit --json train.py --epochs 3
  keras-psplus plan --links links.json train.py
  keras-psplus plan --workers 4 --memory 16GB train.py
  keras-psplus plan --stages 4 train.py
  keras-psplus plan --stages 4 --microbatches 16 --schedule 1f1b --json train.py --epochs 3
"""
_COUNTS = {"workers": (2, 1, "Number of workers"), "ps": (2, 0, "Number of parameter servers")}
_LINK = "1gbit"
_OF_STAGES = ("microbatches", "schedule")
_OF_CHOICES = ("workers", "ps", "link", "links", "delay", "memory")
_SIZE = re.compile(r"(\d+\.?\d*)([KMGT])(i?)B", re.IGNORECASE)


def main(argv: list[str]) -> int:
    """Runs the command; returns an exit code.

    0 with a plan, 1 without, 2 for a wrong command line.
    """
    options = _flags()
    if parsing.shows_help(_USAGE, options, argv):
        return 0
    try:
        command = parsing.parse(options, argv)
        _check_flags(options)
        cluster = _cluster(options)
        parsing.check_script(command)
    except (parsing.UsageError, ClusterConfigError) as error:
        return parsing.complain("plan", error)
    try:
        if options.link == plan_links.MEASURED:
            links = plan_links.measure()
            if links is None:
                print("keras-psplus plan: the chief plans.", file=sys.stderr)
                return 0
            cluster = _over(cluster, links)
        answer = plan_script.ask(
            command,
            workers=cluster.workers,
            stages=options.stages,
            microbatches=options.microbatches,
            schedule=options.schedule,
        )
    except KeyboardInterrupt:  # which the script has had as well
        return 128 + signal.SIGINT
    except (plan_links.LinksError, plan_script.ScriptError) as error:
        print(f"keras-psplus plan: {error}", file=sys.stderr)
        return 1
    plan, text = _choices(answer, cluster) if options.stages is None else _stages(answer)
    print(json.dumps(plan, indent=2) if options.json else text)
    return 0


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    for name, (default, least, text) in _COUNTS.items():
        text = f"{text} (default: {default})."
        flags.DEFINE_integer(name, None, text, flag_values=values, lower_bound=least)
    flags.DEFINE_string(
        "link",
        None,
        f"Rate of each task's link, as 100mbit or 1gbit (default: {_LINK}); or `measured`, started "
        "in each worker of a cluster at once.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "links",
        None,
        "File of the links between hosts, as `keras-psplus doctor --links --json` prints them.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "delay",
        None,
        "Milliseconds from host to host (default: 0).",
        flag_values=values,
        lower_bound=0,
    )
    flags.DEFINE_string(
        "memory",
        None,
        "Memory of a worker for weights, gradients and the optimizer's state, as 16GB or 512MiB; "
        "entries that need more are not recommended.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "stages",
        None,
        "Number of stages, for the plan of a pipeline.",
        flag_values=values,
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "microbatches",
        None,
        "Number of micro-batches of a batch (default: the script's).",
        flag_values=values,
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "schedule",
        None,
        ["1f1b", "gpipe", "pipedream"],
        "The order of the stages' work (default: the script's).",
        flag_values=values,
    )
    flags.DEFINE_boolean("json", False, "Print JSON instead of a table.", flag_values=values)
    return values


def _check_flags(options: flags.FlagValues) -> None:
    strange = _OF_STAGES if options.stages is None else _OF_CHOICES
    given = [name for name in strange if options[name].value is not None]
    if given:
        goes = "goes with --stages" if options.stages is None else "does not go with --stages"
        raise parsing.UsageError(f"--{given[0]} {goes}. Received: --{given[0]}")
    if options.links is not None and (options.link is not None or options.delay is not None):
        raise parsing.UsageError(
            "--links says how fast links are: leave out --link and --delay. Received: "
            f"--links={options.links}, --link={options.link}, --delay={options.delay}"
        )
    if options.link == plan_links.MEASURED and options.delay is not None:
        raise parsing.UsageError(
            f"the delay is measured: leave out --delay. Received: --delay={options.delay}"
        )


def _memory(options: flags.FlagValues) -> float | None:
    if options.memory is None:
        return None
    match = _SIZE.fullmatch(options.memory)
    size = 0.0
    if match:
        power = 1 + "KMGT".index(match[2].upper())
        size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not size:
        raise parsing.UsageError(
            f"--memory is a size such as 16GB or 512MiB. Received: {options.memory!r}"
        )
    return size


def _cluster(options: flags.FlagValues) -> Cluster:
    """Cluster to plan for, without links that are yet to be measured."""
    return dataclasses.replace(_linked(options), memory=_memory(options))


def _linked(options: flags.FlagValues) -> Cluster:
    if options.links is not None:
        links = plan_links.read(options.links, options.workers)
        cluster = Cluster(len(links.hosts), _count(options, "ps"))
        return _over(cluster, links)
    if options.link == plan_links.MEASURED:
        task = plan_links.cluster_to_measure(options.workers, options.ps)
        return Cluster(task.num_workers, task.num_ps)
    return Cluster(
        _count(options, "workers"),
        _count(options, "ps"),
        plan_links.bits_per_second(options.link or _LINK),
        options.delay or 0.0,
    )


def _over(cluster: Cluster, links: Links) -> Cluster:
    rate, delay = plan_links.links_of_cluster(links)
    return dataclasses.replace(cluster, bits_per_second=rate, delay_ms=delay)


def _count(options: flags.FlagValues, name: str) -> int:
    given = options[name].value
    return _COUNTS[name][0] if given is None else given


def _stages(answer: dict[str, Any]) -> tuple[Any, str]:
    return answer["plan"], answer["text"]


def _choices(answer: dict[str, Any], cluster: Cluster) -> tuple[dict[str, Any], str]:
    """Predicted choices, as JSON and as text."""
    stages = [
        name
        for name in lookup.names()
        if entries.read(lookup.find(name)).strategy == "PipelineStrategy"
    ]
    made = choices.choose(choices.Facts.from_json(answer), automatic.planned(), cluster)
    return made.as_dict(), f"{made}\n{', '.join(stages)}: see keras-psplus plan --stages N"
