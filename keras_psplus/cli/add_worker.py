"""`keras-psplus add-worker`: one more worker for a job that is under way."""

from __future__ import annotations

import pathlib
import shlex
import sys

from keras_psplus.cli.flags import Parser, UsageError
from keras_psplus.cluster.launcher.task_ends import ADD_WORKER
from keras_psplus.cluster.monitor import job as job_module

_USAGE = """
usage: keras-psplus add-worker JOB

Starts one more worker of a job of `keras-psplus run --workers MIN:MAX` here or on its
hosts. JOB is the process id of its launcher, which `keras-psplus status` shows. The worker takes
steps once its TensorFlow is up, and nobody is started again. End its process (SIGTERM) to have it
leave.
Of a job on other machines, run it where the launcher is; of one without a launcher, start one of
the commands of MAX workers that `run --hosts --dry_run` prints.

  keras-psplus run --workers 1:3 --ps 1 train.py
  keras-psplus add-worker 4711
"""
_ELSEWHERE = (
    "the hosts are those that the job was started with, `keras-psplus run --workers MIN:MAX --ps 1 "
    "--hosts H1,H2,... train.py`: name the job alone, by the process id of its launcher, on the "
    "launcher's machine. Under Slurm, a worker is added by "
    "`srun keras-psplus exec --ps 1 --workers MIN:MAX --join NUMBER train.py`. Received: "
)
_ANSWER_SECONDS = 15.0


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 1 if the job takes no worker."""
    if any(word.partition("=")[0] in ("--hosts", "--host") for word in argv):
        raise UsageError(_ELSEWHERE + shlex.join(argv))
    rest = _parser().read(argv).command
    if len(rest) != 1:
        raise UsageError(
            "name one job, by the process id of its launcher (`keras-psplus status`). "
            f"Received: {shlex.join(rest) or 'no job'}"
        )
    try:
        folder = _folder(rest[0])
    except OSError as error:
        raise UsageError(str(error)) from None
    try:
        name = job_module.ask(folder, ADD_WORKER, _ANSWER_SECONDS)
    except (OSError, job_module.RequestError) as error:
        print(f"keras-psplus {ADD_WORKER}: {error}", file=sys.stderr)
        return 1
    print(f"{name} is started, and takes steps once its TensorFlow is up")
    return 0


def _parser() -> Parser:
    return Parser(_USAGE)


def _folder(job: str) -> pathlib.Path:
    """The folder of a running job that takes workers."""
    running = [
        (folder, said) for folder, said, _ in job_module.read_all() if job_module.is_running(said)
    ]
    found = [(folder, said) for folder, said in running if str(said["pid"]) == job]
    if not found:
        ranges = [str(said["pid"]) for _, said in running if said.get("min_workers") is not None]
        raise UsageError(
            f"no job of this user has a launcher with this process id; jobs that take workers: "
            f"{', '.join(ranges) or 'none'}. Received: {job}"
        )
    folder, said = found[0]
    if said.get("min_workers") is None:
        raise UsageError(
            "the job has a fixed number of workers: start it with a range, `keras-psplus run "
            f"--workers MIN:MAX`. Received: {job}, of {shlex.join(said['command'])}"
        )
    return folder
