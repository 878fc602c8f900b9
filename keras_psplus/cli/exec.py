"""`keras-psplus exec`: a script as one task of a cluster that another launcher has started."""

import argparse
import os
import sys

from keras_psplus.cli import flags
from keras_psplus.cli.flags import UsageError
from keras_psplus.cluster.config import EVALUATOR, ClusterConfigError, TaskConfig
from keras_psplus.cluster.console import warn
from keras_psplus.cluster.discovery import launchers
from keras_psplus.cluster.discovery.find import find_ranks, find_task_config
from keras_psplus.cluster.discovery.launchers import FIRST_RANK_VARIABLE
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE
from keras_psplus.cluster.process.signals import GRACE_VARIABLE, grace_seconds

_USAGE = """
usage: keras-psplus exec [flags] SCRIPT [arguments of the script]

Runs SCRIPT in this process, with the TF_CONFIG that the variables of Slurm, MPI, torchrun or
Kubernetes tell. Every process of the cluster runs it alike: of N processes the first is the chief
(if there is one), then come the workers, and the last are the parameter servers.

  srun --ntasks=4 keras-psplus exec train.py
  srun --ntasks=5 keras-psplus exec --ps 2 --strategy async_parameter_server train.py
  mpirun -n 3 keras-psplus exec --strategy pipeline train.py

A job of --workers MIN:MAX begins with MIN workers or more, and others join it: KERAS_PSPLUS_HOSTS
has the hosts of the chief, the ps and all MAX workers, in this order.

  srun --ntasks=3 keras-psplus exec --ps 1 --workers 1:3 train.py
  srun --ntasks=1 keras-psplus exec --ps 1 --workers 1:3 --join 1 train.py
"""


def main(argv: list[str]) -> int:
    """Runs the command by replacing this process with the script."""
    parser = _parser()
    options = parser.read(argv)
    command = options.command
    flags.check_script(command)
    try:
        config = _task(options)
        counts = {
            "workers": len(config.cluster.get("worker", ())) if config else 1,
            "ps": config.num_ps if config else 0,
            "chief": "chief" in config.cluster if config else False,
        }
        os.environ.update(flags.variables(options, counts))
        if options.grace is not None:
            os.environ[GRACE_VARIABLE] = f"{options.grace:g}"
        grace_seconds()  # raises ValueError
    except (ClusterConfigError, ValueError) as error:
        raise UsageError(str(error)) from None
    remarks = flags.remarks(parser, command, config.num_workers if config else 1)
    if config is None or config.is_chief:
        for remark in remarks:
            warn(remark)
    sys.stdout.flush()
    sys.stderr.flush()
    # In its place: signals, exit codes and the scheduler's accounting are the script's.
    os.execv(sys.executable, [sys.executable, *command])


def _task(options: argparse.Namespace) -> TaskConfig | None:
    """This process's task; None if it trains alone."""
    if text := os.environ.get(launchers.LAYOUT_VARIABLE):
        if options.ps or options.chief is not None or options.evaluator or options.workers:
            raise UsageError(
                f"{launchers.LAYOUT_VARIABLE} says which tasks there are: leave out --workers, "
                "--ps, --chief and --evaluator, or unset it. "
                f"Received: {launchers.LAYOUT_VARIABLE}={text}"
            )
        return find_task_config()
    chief = flags.chief_of(options)
    if options.join is not None and options.workers is None:
        raise UsageError(
            "--join goes with the --workers MIN:MAX of the job that is joined. "
            f"Received: --join={options.join}"
        )
    roles = {"chief": int(chief), "ps": options.ps, EVALUATOR: int(options.evaluator)}
    if any(roles.values()) or options.workers is not None:
        if os.environ.get("TF_CONFIG", "").strip():
            raise UsageError(
                "TF_CONFIG says which task this is: leave out --workers, --ps, --chief and "
                f"--evaluator, or unset it. Received: TF_CONFIG={os.environ['TF_CONFIG']}"
            )
        if options.workers is not None:
            return _task_of_range(options, chief)
        ranks = find_ranks(os.environ)
        size = 1 if ranks is None else ranks.size
        workers = size - sum(roles.values())
        if workers < 0 or workers + roles["chief"] < 1:
            raise UsageError(
                f"{size} processes are too few for --ps={options.ps}, {roles['chief']} chief and a "
                "worker: start more (`srun --ntasks`, `mpirun -n`). "
                f"Received: {ranks.source if ranks else 'a process that no launcher names'}"
            )
        counts = {"chief": roles["chief"], "worker": workers, "ps": options.ps}
        os.environ[launchers.LAYOUT_VARIABLE] = launchers.text_of(
            counts | {EVALUATOR: roles[EVALUATOR]}
        )
    return find_task_config()


def _task_of_range(options: argparse.Namespace, chief: bool) -> TaskConfig | None:
    """This process's task in a job whose workers come and go.

    The workers are the last ranks, so that those that come later have the next ones.
    """
    least, most = flags.workers_of(options.workers)
    received = f"Received: --workers={options.workers}, --join={options.join}"
    if least is None or most is None:
        raise UsageError(
            "`exec` has a worker in each process that is neither chief nor ps: leave out "
            f"--workers, or give a range, as in 1:3. {received}"
        )
    if options.evaluator:
        raise UsageError(
            "an evaluator goes with a fixed number of workers: leave out --workers or --evaluator. "
            f"{received}, --evaluator"
        )
    flags.check_range(options, chief)
    ranks = find_ranks({**os.environ, MIN_WORKERS_VARIABLE: str(least)})
    size, others = 0 if ranks is None else ranks.size, 1 + options.ps
    room = most + others if options.join is None else most - options.join
    if not (others + least if options.join is None else 1) <= size <= room:
        raise UsageError(
            f"{size} processes are too few or too many: a job begins with a chief, {options.ps} ps "
            f"and {least} to {most} workers, and as many join as are left of the range. {received}"
        )
    counts = {"chief": 1, "ps": options.ps, "worker": most}
    os.environ[launchers.LAYOUT_VARIABLE] = launchers.text_of(counts)
    os.environ[MIN_WORKERS_VARIABLE] = str(least)
    os.environ[FIRST_RANK_VARIABLE] = str(0 if options.join is None else others + options.join)
    return find_task_config()


def _parser() -> flags.Parser:
    parser = flags.Parser(_USAGE)
    parser.text(
        "workers",
        "MIN:MAX, of a job whose workers come and go: some of them are started now, others join.",
    )
    parser.number(
        "join",
        int,
        "The processes join a job of --workers MIN:MAX, as its workers from this number on.",
    )
    parser.number("ps", int, "How many of the processes, the last ones, are parameter servers.", 0)
    parser.switch(
        "chief",
        "Whether the first process is the chief (default: if there are parameter servers, or with "
        "--strategy pipeline).",
        None,
    )
    parser.switch("evaluator", "Whether the very last process is an evaluator, beside the cluster.")
    parser.number(
        "grace",
        float,
        "Seconds that this process has after SIGTERM to save the job (BackupAndRestore); 0: it "
        "ends at once (default: until the scheduler kills it).",
    )
    flags.add_strategy(parser)
    return parser
