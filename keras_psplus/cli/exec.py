"""`keras-psplus exec`: a script as one task of a cluster that another launcher has started."""

import os
import sys

from absl import flags

from keras_psplus.cli.flags import combinations, parsing
from keras_psplus.cli.planning import strategy_flags
from keras_psplus.cluster.config import EVALUATOR, ClusterConfigError, TaskConfig
from keras_psplus.cluster.discovery import layout
from keras_psplus.cluster.discovery.discovery import find_ranks, find_task_config
from keras_psplus.cluster.output.console import warn

_USAGE = """
usage: keras-psplus exec [flags] SCRIPT [arguments of the script]

Runs SCRIPT in this process, with the TF_CONFIG that the variables of Slurm, MPI, torchrun or
Kubernetes tell. Every process of the cluster runs it alike: of N processes the first is the chief
(if there is one), then come the workers, and the last are the parameter servers.

  srun --ntasks=4 keras-psplus exec train.py
  srun --ntasks=5 keras-psplus exec --ps 2 --strategy async_parameter_server train.py
  mpirun -n 3 keras-psplus exec --strategy pipeline train.py
"""


def main(argv: list[str]) -> int:
    """Runs the command by replacing this process with the script.

    Returns 2 for a wrong command line.
    """
    options = _flags()
    if parsing.shows_help(_USAGE, options, argv):
        return 0
    try:
        command = parsing.parse(options, argv)
        parsing.check_script(command)
        config = _task(options)
        counts = {
            "workers": len(config.cluster.get("worker", ())) if config else 1,
            "ps": config.num_ps if config else 0,
            "chief": "chief" in config.cluster if config else False,
        }
        log = None if config is None or config.is_chief else lambda line: None
        os.environ.update(strategy_flags.variables(options, counts, log))
    except (parsing.UsageError, ClusterConfigError, ValueError) as error:
        return parsing.complain("exec", error)
    if config is None or config.is_chief:
        for remark in parsing.remarks(options, command):
            warn(remark)
    sys.stdout.flush()
    sys.stderr.flush()
    # In its place: signals, exit codes and the scheduler's accounting are the script's.
    os.execv(sys.executable, [sys.executable, *command])


def _task(options: flags.FlagValues) -> TaskConfig | None:
    """This process's task; None if it trains alone."""
    if text := os.environ.get(layout.LAYOUT_VARIABLE):
        if options.ps or options.chief is not None or options.evaluator:
            raise parsing.UsageError(
                f"{layout.LAYOUT_VARIABLE} says which tasks there are: leave out --ps, --chief and "
                f"--evaluator, or unset it. Received: {layout.LAYOUT_VARIABLE}={text}"
            )
        return find_task_config()
    chief = combinations.chief_of(options)
    roles = {"chief": int(chief), "ps": options.ps, EVALUATOR: int(options.evaluator)}
    if any(roles.values()):
        if os.environ.get("TF_CONFIG", "").strip():
            raise parsing.UsageError(
                "TF_CONFIG says which task this is: leave out --ps, --chief and --evaluator, or "
                f"unset it. Received: TF_CONFIG={os.environ['TF_CONFIG']}"
            )
        ranks = find_ranks(os.environ)
        size = 1 if ranks is None else ranks.size
        workers = size - sum(roles.values())
        if workers < 0 or workers + roles["chief"] < 1:
            raise parsing.UsageError(
                f"{size} processes are too few for --ps={options.ps}, {roles['chief']} chief and a "
                "worker: start more (`srun --ntasks`, `mpirun -n`). "
                f"Received: {ranks.source if ranks else 'a process that no launcher names'}"
            )
        counts = {"chief": roles["chief"], "worker": workers, "ps": options.ps}
        os.environ[layout.LAYOUT_VARIABLE] = layout.text_of(counts | {EVALUATOR: roles[EVALUATOR]})
    return find_task_config()


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "ps",
        0,
        "How many of the processes, the last ones, are parameter servers.",
        flag_values=values,
        lower_bound=0,
    )
    flags.DEFINE_boolean(
        "chief",
        None,
        "Whether the first process is the chief (default: if there are parameter servers, or with "
        "--strategy pipeline).",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "evaluator",
        False,
        "Whether the very last process is an evaluator, beside the cluster.",
        flag_values=values,
    )
    strategy_flags.define(values)
    return values
