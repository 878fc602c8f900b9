"""`keras-psplus plan`: how a script's model would be cut into stages, without training it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl import flags

import keras_psplus
from keras_psplus import catalogue
from keras_psplus.cli import parsing
from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.noise import NoiseFilter

_USAGE = """
usage: keras-psplus plan --stages N [flags] SCRIPT [arguments of the script]

Runs SCRIPT in one process, without a cluster, until it calls fit, and prints how PipelineStrategy
would cut the model into N stages: layers, memory, estimated times, bytes from stage to stage.
Nothing is trained. What the script prints is shown if it fails. Layers are measured on this
machine, unless the script says stages="flops".

  keras-psplus plan --stages 4 train.py
  keras-psplus plan --stages 4 --microbatches 16 --schedule 1f1b --json train.py --epochs 3
"""
# `keras_psplus.core.plan_request.VARIABLE`, whose module needs TensorFlow.
_VARIABLE = "KERAS_PSPLUS_PLAN"
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
        if options.stages is None:
            raise parsing.UsageError("say into how many stages, as in --stages 4")
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
        print(json.dumps(answer["plan"], indent=2) if options.json else answer["text"])
        return 0
    print(f"keras-psplus plan: {_problem(result, command)}", file=sys.stderr)
    return 1


def _flags():
    values = flags.FlagValues()
    flags.DEFINE_integer("stages", None, "Number of stages.", flag_values=values, lower_bound=1)
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


def _environment(options, file):
    request = {
        "stages": options.stages,
        "file": str(file),
        "microbatches": options.microbatches,
        "schedule": options.schedule,
    }
    # The plan is that of a pipeline, whatever this shell was set up for.
    dropped = ("TF_CONFIG", *catalogue.OPTION_VARIABLES.values())
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        "CUDA_VISIBLE_DEVICES": "",
        **inherited,
        catalogue.STRATEGY_VARIABLE: "pipeline",
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
