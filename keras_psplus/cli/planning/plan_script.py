"""Runs a script in one process up to `fit`, to answer `keras-psplus plan`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import keras_psplus
from keras_psplus.catalogue import lookup
from keras_psplus.cli.flags import report
from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.output.log_filter import NoiseFilter

# `core.plan.plan_request.VARIABLE` and `tracebacks.FULL_VARIABLE`, whose modules need TensorFlow.
_VARIABLE = "KERAS_PSPLUS_PLAN"
_FULL_TRACEBACK = "KERAS_PSPLUS_FULL_TRACEBACK"


class ScriptError(Exception):
    """The script has given no answer; the message says why."""


def ask(
    command: Sequence[str],
    *,
    workers: int = 1,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Starts a script, and has its first call of `fit` answer.

    Args:
        command: The script and its arguments.
        workers: Number of workers that are to share a batch.
        stages: Number of stages, for the plan of a pipeline; None for what is measured.
        microbatches: Number of micro-batches instead of the script's.
        schedule: The schedule instead of the script's.
        variables: Dict of further environment variables.

    Returns:
        The answer of `keras_psplus.core.plan.plan_request`.

    Raises:
        ScriptError: If the script has failed, or has ended without a call of `fit`.
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
            env=_environment(request) | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if file.is_file():
            return json.loads(file.read_text())
    raise ScriptError(_problem(result, command))


def _environment(request: Mapping[str, Any]) -> dict[str, str]:
    # The plan is that of one process or a pipeline, whatever this shell was set up for.
    dropped = ("TF_CONFIG", *lookup.OPTION_VARIABLES.values())
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        "CUDA_VISIBLE_DEVICES": "",
        **inherited,
        lookup.STRATEGY_VARIABLE: "single" if request["stages"] is None else "pipeline",
        _VARIABLE: json.dumps(request),
        # `_problem` sees by the frames whether the library has refused something.
        _FULL_TRACEBACK: "1",
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
    traceback = report.last_traceback(lines)
    if not traceback:
        head = f"the script has failed ({result.returncode}):"
        return "\n".join([head, *lines[-report.LAST_LINES :]])
    files = [line for line in traceback if line.startswith('  File "')]
    package = str(pathlib.Path(next(iter(keras_psplus.__path__))))
    if files and files[-1].startswith(f'  File "{package}'):
        # The library has refused something, and says what would do.
        message = [line for line in traceback[1:] if not line.startswith(" ")]
        return "\n".join(message)
    return "\n".join(["the script has failed:", *traceback[-report.LAST_LINES :]])
