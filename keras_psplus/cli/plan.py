"""`keras-psplus plan`: bytes, memory and floors of each entry for a script's model.

The script runs in one process up to `fit`, without a cluster. With `--stages`, the
stages into which `PipelineStrategy` would cut it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import keras_psplus
from keras_psplus import catalogue, planning
from keras_psplus.cli import flags
from keras_psplus.cli.flags import UsageError
from keras_psplus.cluster.console import NoiseFilter
from keras_psplus.cluster.environment import python_path
from keras_psplus.planning import Cluster, traits_of

_USAGE = """
usage: keras-psplus plan [flags] SCRIPT [arguments of the script]

Runs SCRIPT in one process, without a cluster, until it calls fit. There it measures some steps, and
prints what each entry of the catalogue would take of this model: bytes, memory, rounds of messages,
the least time of a step, what it loses. What the script prints is shown if it fails.

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
_OF_TABLE = ("workers", "ps", "link", "links", "delay", "memory")
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_SIZE = re.compile(r"(\d+\.?\d*)([KMGT])(i?)B", re.IGNORECASE)


class ScriptError(Exception):
    """The script has given no answer; the message says why."""


def main(argv: list[str]) -> int:
    """Runs the command; returns 0 with a plan, 1 without."""
    options = _parser().read(argv)
    _check_flags(options)
    cluster = _cluster(options)
    flags.check_script(options.command)
    try:
        answer = ask(
            options.command,
            workers=cluster.workers,
            stages=options.stages,
            microbatches=options.microbatches,
            schedule=options.schedule,
        )
    except KeyboardInterrupt:  # which the script has had as well
        return 128 + signal.SIGINT
    except ScriptError as error:
        print(f"keras-psplus plan: {error}", file=sys.stderr)
        return 1
    plan, text = _table(answer, cluster) if options.stages is None else _stages(answer)
    print(json.dumps(plan, indent=2) if options.json else text)
    return 0


def ask(
    command: Sequence[str],
    *,
    workers: int = 1,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
) -> dict[str, Any]:
    """Starts a script, and has its first call of `fit` answer.

    Args:
        workers: Number of workers that are to share a batch.
        stages: Number of stages, for the plan of a pipeline; None for what is measured.
        microbatches: Number of micro-batches instead of the script's.
        schedule: The schedule instead of the script's.

    Returns:
        The answer of `keras_psplus.core.plan`.
    """
    with tempfile.TemporaryDirectory(prefix="keras_psplus_") as folder:
        file = pathlib.Path(folder) / "plan.json"
        request = {
            "stages": stages,
            "workers": workers,
            "file": str(file),
            "microbatches": microbatches,
            "schedule": schedule,
        }
        result = subprocess.run(
            [sys.executable, *command],
            env=_environment(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if file.is_file():
            return json.loads(file.read_text())
    raise ScriptError(_problem(result, command))


def _parser() -> flags.Parser:
    parser = flags.Parser(_USAGE)
    for name, (default, least, text) in _COUNTS.items():
        parser.number(name, int, f"{text} (default: {default}).", least=least)
    parser.text("link", f"Rate of each task's link, as 100mbit or 1gbit (default: {_LINK}).")
    parser.text(
        "links",
        "File of the links between hosts, as `keras-psplus doctor --links --json` prints them.",
    )
    parser.number("delay", float, "Milliseconds from host to host (default: 0).")
    parser.text(
        "memory",
        "Memory of a worker for weights, gradients and the optimizer's state, as 16GB or 512MiB; "
        "entries that need more are marked.",
    )
    parser.number("stages", int, "Number of stages, for the plan of a pipeline.", least=1)
    parser.number(
        "microbatches",
        int,
        "Number of micro-batches of a batch (default: the script's).",
        least=1,
    )
    parser.choice(
        "schedule",
        ["1f1b", "gpipe", "pipedream"],
        "The order of the stages' work (default: the script's).",
    )
    parser.switch("json", "Print JSON instead of a table.")
    return parser


def _check_flags(options: argparse.Namespace) -> None:
    strange = _OF_STAGES if options.stages is None else _OF_TABLE
    given = [name for name in strange if getattr(options, name) is not None]
    if given:
        goes = "goes with --stages" if options.stages is None else "does not go with --stages"
        raise UsageError(f"--{given[0]} {goes}. Received: --{given[0]}")
    if options.links is not None and (options.link is not None or options.delay is not None):
        raise UsageError(
            "--links says how fast links are: leave out --link and --delay. Received: "
            f"--links={options.links}, --link={options.link}, --delay={options.delay}"
        )


def _memory(options: argparse.Namespace) -> float | None:
    if options.memory is None:
        return None
    match = _SIZE.fullmatch(options.memory)
    size = 0.0
    if match:
        power = 1 + "KMGT".index(match[2].upper())
        size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not size:
        raise UsageError(f"--memory is a size such as 16GB or 512MiB. Received: {options.memory!r}")
    return size


def _cluster(options: argparse.Namespace) -> Cluster:
    memory = _memory(options)
    if options.links is None:
        rate, delay = _bits_per_second(options.link or _LINK), options.delay or 0.0
        return Cluster(_count(options, "workers"), _count(options, "ps"), rate, delay, memory)
    try:
        links = planning.read_links(options.links)
    except ValueError as error:
        raise UsageError(f"--links cannot be used: {error}") from None
    if options.workers not in (None, len(links.hosts)):
        raise UsageError(
            f"--links has the links of {len(links.hosts)} hosts: leave out --workers, or measure "
            f"those of {options.workers}. Received: --workers={options.workers}, "
            f"--links={options.links}"
        )
    delay, rate = links.slowest_of_ring
    return Cluster(len(links.hosts), _count(options, "ps"), rate, delay, memory)


def _bits_per_second(text: str) -> float:
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    if not rate:
        raise UsageError(f"--link is a rate such as 100mbit or 1gbit. Received: {text!r}")
    return rate


def _count(options: argparse.Namespace, name: str) -> int:
    given = getattr(options, name)
    return _COUNTS[name][0] if given is None else given


def _stages(answer: dict[str, Any]) -> tuple[Any, str]:
    return answer["plan"], answer["text"]


def _table(answer: dict[str, Any], cluster: Cluster) -> tuple[dict[str, Any], str]:
    """Rows of all entries but pipelines, as JSON and as text."""
    traits, stages = {}, []
    for name, entry in catalogue.ENTRIES.items():
        if entry.strategy == "PipelineStrategy":
            stages.append(name)
        else:
            traits[name] = traits_of(entry.strategy, entry.arguments)
    plan = planning.plan(planning.Facts.from_json(answer), traits, cluster)
    return plan.as_dict(), f"{plan}\n{', '.join(stages)}: see keras-psplus plan --stages N"


def _environment(request: Mapping[str, Any]) -> dict[str, str]:
    # The plan is that of one process or a pipeline, whatever this shell was set up for.
    dropped = ("TF_CONFIG", *catalogue.OPTION_VARIABLES.values())
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        "CUDA_VISIBLE_DEVICES": "",
        **inherited,
        catalogue.STRATEGY_VARIABLE: "single" if request["stages"] is None else "pipeline",
        catalogue.PLAN_REQUEST_VARIABLE: json.dumps(request),
        "PYTHONPATH": python_path(),
    }


def _problem(result: subprocess.CompletedProcess[str], command: Sequence[str]) -> str:
    """Reason why there is no plan."""
    is_noise = NoiseFilter().is_noise
    lines = [line for line in result.stdout.splitlines() if not is_noise(line)]
    if result.returncode == 0:
        return (
            "the script has ended without a call of `fit` of a model in a strategy's scope, so "
            "there is nothing to plan. Call `model.fit` under the same arguments as in training. "
            f"Received: {' '.join(command)}"
        )
    traceback = flags.last_traceback(lines)
    if not traceback:
        head = f"the script has failed ({result.returncode}):"
        return "\n".join([head, *lines[-flags.LAST_LINES :]])
    files = [line for line in traceback if line.startswith('  File "')]
    package = str(pathlib.Path(next(iter(keras_psplus.__path__))))
    if files and files[-1].startswith(f'  File "{package}'):
        # The library has refused something, and says what would do.
        message = [line for line in traceback[1:] if not line.startswith(" ")]
        return "\n".join(message)
    return "\n".join(["the script has failed:", *traceback[-flags.LAST_LINES :]])
