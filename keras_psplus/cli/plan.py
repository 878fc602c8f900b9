"""`keras-psplus plan`: what each way of training would take of a script's model, without a cluster.

With `--stages`, how `PipelineStrategy` would cut it.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

from absl import flags

import keras_psplus
from keras_psplus import catalogue, entries
from keras_psplus.cli import parsing
from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.noise import NoiseFilter
from keras_psplus.planning import choices
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.traits import traits_of

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
  keras-psplus plan --stages 4 train.py
  keras-psplus plan --stages 4 --microbatches 16 --schedule 1f1b --json train.py --epochs 3
"""
# `keras_psplus.core.plan_request.VARIABLE`, whose module needs TensorFlow.
_VARIABLE = "KERAS_PSPLUS_PLAN"
_COUNTS = {"workers": (2, 1, "Number of workers"), "ps": (2, 0, "Number of parameter servers")}
_LINK = "1gbit"
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_OF_STAGES = ("microbatches", "schedule")
_OF_CHOICES = ("workers", "ps", "link", "delay")
_TRACEBACK = "Traceback (most recent call last)"
_LAST_LINES = 80


def main(argv: list[str]) -> int:
    """Runs the command; returns 0 with a plan, 1 without, 2 for a wrong command line."""
    options = _flags()
    if parsing.asks_for_help(options, argv):
        print(parsing.help_text(_USAGE, options))
        return 0
    try:
        command = parsing.parse(options, argv)
        _check_flags(options)
        if not command:
            raise parsing.UsageError("name the script to plan for, after the flags")
        if not pathlib.Path(command[0]).is_file():
            raise parsing.UsageError(f"there is no script {command[0]!r}")
    except parsing.UsageError as error:
        return parsing.complain("plan", error)
    with tempfile.TemporaryDirectory(prefix="keras_psplus_") as folder:
        file = pathlib.Path(folder) / "plan.json"
        try:
            result = subprocess.run(
                [sys.executable, *command],
                env=_environment(options, file),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except KeyboardInterrupt:  # which the script has had as well
            return 128 + signal.SIGINT
        answer = json.loads(file.read_text()) if file.is_file() else None
    if answer is not None:
        plan, text = _choices(answer, options) if options.stages is None else _stages(answer)
        print(json.dumps(plan, indent=2) if options.json else text)
        return 0
    print(f"keras-psplus plan: {_problem(result, command)}", file=sys.stderr)
    return 1


def _flags():
    values = flags.FlagValues()
    for name, (default, least, text) in _COUNTS.items():
        text = f"{text} (default: {default})."
        flags.DEFINE_integer(name, None, text, flag_values=values, lower_bound=least)
    flags.DEFINE_string(
        "link",
        None,
        f"Rate of each task's link, as 100mbit or 1gbit (default: {_LINK}).",
        flag_values=values,
    )
    flags.DEFINE_float(
        "delay",
        None,
        "Milliseconds from host to host (default: 0).",
        flag_values=values,
        lower_bound=0,
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


def _check_flags(options):
    strange = _OF_STAGES if options.stages is None else _OF_CHOICES
    given = [name for name in strange if options[name].value is not None]
    if given:
        goes = "goes with --stages" if options.stages is None else "does not go with --stages"
        raise parsing.UsageError(f"--{given[0]} {goes}. Received: --{given[0]}")
    _bits_per_second(options.link or _LINK)


def _bits_per_second(text):
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    if not rate:
        raise parsing.UsageError(f"--link is a rate such as 100mbit or 1gbit. Received: {text!r}")
    return rate


def _count(options, name):
    given = options[name].value
    return _COUNTS[name][0] if given is None else given


def _stages(answer):
    return answer["plan"], answer["text"]


def _choices(answer, options):
    """What there is to choose from: as JSON has it, and as text."""
    cluster = Cluster(
        _count(options, "workers"),
        _count(options, "ps"),
        _bits_per_second(options.link or _LINK),
        options.delay or 0.0,
    )
    found = {name: catalogue.find(name) for name in catalogue.names()}
    stages = [n for n, path in found.items() if entries.read(path).strategy == "PipelineStrategy"]
    traits = {n: traits_of(path.read_text()) for n, path in found.items() if n not in stages}
    made = choices.choose(choices.Facts.from_json(answer), traits, cluster)
    return made.as_dict(), f"{made}\n{', '.join(stages)}: see keras-psplus plan --stages N"


def _environment(options, file):
    request = {
        "stages": options.stages,
        "workers": _count(options, "workers"),
        "file": str(file),
        "microbatches": options.microbatches,
        "schedule": options.schedule,
    }
    # The plan is that of one process or a pipeline, whatever this shell was set up for.
    dropped = ("TF_CONFIG", *catalogue.OPTION_VARIABLES.values())
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        "CUDA_VISIBLE_DEVICES": "",
        **inherited,
        catalogue.STRATEGY_VARIABLE: "single" if options.stages is None else "pipeline",
        _VARIABLE: json.dumps(request),
        "PYTHONPATH": python_path(),
    }


def _problem(result, command):
    """Why there is no plan."""
    is_noise = NoiseFilter().is_noise
    lines = [line for line in result.stdout.splitlines() if not is_noise(line)]
    if result.returncode == 0:
        return (
            "the script has ended without a call of `fit` of a model in a strategy's scope, so "
            "there is nothing to plan. Call `model.fit` under the same arguments as in training. "
            f"Received: {' '.join(command)}"
        )
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return "\n".join([f"the script has failed ({result.returncode}):", *lines[-_LAST_LINES:]])
    traceback = lines[starts[-1] :]
    files = [line for line in traceback if line.startswith('  File "')]
    package = str(pathlib.Path(next(iter(keras_psplus.__path__))))
    if files and files[-1].startswith(f'  File "{package}'):
        # The library has refused something, and says what would do.
        message = [line for line in traceback[1:] if not line.startswith(" ")]
        return "\n".join(message)
    return "\n".join(["the script has failed:", *traceback[-_LAST_LINES:]])
