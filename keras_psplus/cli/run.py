"""`keras-psplus run`: one script in every task of a cluster."""

import contextlib
import os
import secrets
import shlex
import signal
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from keras_psplus import catalogue
from keras_psplus.cli import flags
from keras_psplus.cli.flags import UsageError
from keras_psplus.cluster import environment, processes
from keras_psplus.cluster.console import Console, drop_unwritten, warn
from keras_psplus.cluster.environment import TOKEN_VARIABLE, plan_tasks, python_path
from keras_psplus.cluster.launcher import task_ends
from keras_psplus.cluster.launcher.remote import RemoteHosts
from keras_psplus.cluster.monitor.job import JobRecord
from keras_psplus.cluster.process.warm import WarmPython, WarmStartError
from keras_psplus.cluster.processes import LocalCluster

_USAGE = """
usage: keras-psplus run [flags] SCRIPT [arguments of the script]

Starts SCRIPT in one process per task, here or on --hosts, each with its own TF_CONFIG. Every line
of output is marked with its task and kept in a log file per task. When a task fails, the others are
ended, its traceback is shown last, and its exit code is passed on. Ctrl-C ends all tasks.

  keras-psplus run --workers 2 train.py --epochs 3
  keras-psplus run --workers 2 --ps 1 --strategy async_parameter_server train.py
  keras-psplus run --workers 2 --strategy all_reduce --compression powersgd:2 train.py
  keras-psplus run --list                                           the entries of the catalogue
  keras-psplus run --max_restarts 3 train.py
  keras-psplus run --hosts 10.0.0.1,10.0.0.2:2 train.py             on two hosts, by ssh
  keras-psplus run --hosts 10.0.0.1,10.0.0.2 --dry_run train.py     how to start it there by hand
"""
_GROUPS = {
    "most used (all flags: with dashes, as --max-restarts, or underscores)": (
        "workers ps strategy hosts max_restarts log_dir"
    ),
    "which tasks, and where": (
        "chief evaluator gpus_per_worker hostfile ssh remote_python start_timeout dry_run"
    ),
    "the strategy": "compression updates list",
    "failures and time": "restart timeout grace warm",
    "output": "output verbose json_log trace trace_steps",
}
_ERROR_GRACE, _IDLE_GRACE = 3.0, 0.5


def main(argv: list[str]) -> int:
    """Runs the command.

    Args:
        argv: Arguments after `run`.

    Returns:
        The exit code: the first failing task's, 124 after a time-out, 130
        after Ctrl-C.
    """
    parser = _parser()
    options = parser.read(argv)
    command = options.command
    if options.list:
        print(_listing())
        return 0
    flags.check_script(command)
    try:
        flags.read_hosts(options)
        if options.warm and sys.platform != "linux":
            raise UsageError(f"--warm needs Linux. Received: {sys.platform}")
        layout, min_workers = flags.read_layout(options)
        if options.restart == "task" and not layout["ps"]:
            raise UsageError(
                "a task is started again by itself where the others go on without it: in a cluster "
                "with parameter servers. Without --restart, the job is started again. "
                f"Received: --restart=task, --ps={layout['ps']}"
            )
        hosts = options.hosts and [host.rpartition("@")[2] for host in options.hosts]
        if options.hosts:
            plan_tasks(**layout, hosts=hosts)  # raises ValueError
        elif options.gpus_per_worker is not None:
            plan_tasks(**layout, gpus_per_worker=options.gpus_per_worker)  # raises ValueError
        env = flags.variables(options, layout)
        argv = [sys.executable, *command]
        if options.dry_run:
            env |= task_ends.environment_of(min_workers)
            # Another host has its own Python, found on its own path.
            shown = ["python", *command] if options.hosts else argv
            gpus = None if hosts else options.gpus_per_worker
            print(_recipe(shown, env, layout, hosts, gpus))
            return 0
        remarks = flags.remarks(parser, command, layout["workers"] + layout["chief"])
        log_dir = flags.log_dir(options.log_dir)
        json_log = flags.json_log(options.json_log)
        trace_to = flags.trace(options.trace, options.trace_steps)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for remark in remarks:
        warn(remark)
    live = "chief-0" if layout["chief"] else "worker-0"
    way = None
    if options.hosts:
        way = RemoteHosts(
            options.hosts,
            options.ssh,
            options.remote_python,
            options.start_timeout,
            options.gpus_per_worker,
        )
        way.place(plan_tasks(**layout, hosts=hosts))
        live = way.label(0)
    leader = None if options.output == "all" else live
    console = Console(live=live, quiet=not options.verbose, leader=leader)

    def log(line: str) -> None:
        console.note(f"keras-psplus: {line}")

    # All starts of a job have it: by that they find what an earlier one has left.
    token = {TOKEN_VARIABLE: os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)}

    def make_cluster(restart: int) -> LocalCluster:
        record.begin_attempt(restart)
        cluster = LocalCluster(
            argv,
            **layout,
            env={**token, **env, **record.environment, "PYTHONPATH": python_path()},
            log_dir=log_dir,
            console=console,
            error_grace=_ERROR_GRACE,
            idle_grace=_IDLE_GRACE,
            grace=options.grace,
            restart=restart,
            task_restarts=options.max_restarts - restart if options.restart != "job" else 0,
            server_restarts=options.restart == "task",
            record=record,
            warm=warm,
            gpus_per_worker=None if way else options.gpus_per_worker,
            min_workers=min_workers,
            remote=way,
        )
        if restart == 0:
            seen = environment.describe({task.name: task.variables for task in cluster.tasks})
            if seen:
                log(seen)
        return cluster

    try:
        with (
            JobRecord(command, layout, log_dir, json_log, trace_to, min_workers) as record,
            WarmPython() if options.warm else contextlib.nullcontext() as warm,
        ):
            result = processes.run(make_cluster, options.max_restarts, options.timeout or None, log)
            record.job_ended(result.exit_code, log)
    except KeyboardInterrupt:  # between two attempts; while tasks run, the cluster sees to it
        return 128 + signal.SIGINT
    except WarmStartError as error:
        print(f"keras-psplus run: {error}", file=sys.stderr)
        return 1
    except (OSError, RuntimeError) as error:  # no process, file or port is left
        print(f"keras-psplus run: the tasks cannot be started: {error}", file=sys.stderr)
        return 1
    flags.show_failure(result, log_dir, options.timeout)
    drop_unwritten(sys.stdout, sys.stderr)
    return result.exit_code


def _parser() -> flags.Parser:
    parser = flags.Parser(_USAGE, _GROUPS)
    parser.text(
        "workers",
        "Number of workers (default: 2); or MIN:MAX under ParameterServerStrategy: "
        "MIN are started, and others join and leave while the job runs (`add-worker`).",
    )
    flags.add_roles(parser)
    parser.switch(
        "evaluator", "Whether an evaluator runs beside the cluster, which evaluates checkpoints."
    )
    parser.number(
        "gpus_per_worker",
        int,
        "GPUs of this machine that each worker sees (default: all, divided among the workers; if "
        "there are fewer than workers, they share them). Other tasks see none.",
    )
    flags.add_strategy(parser)
    parser.switch("list", "List the catalogue's entries.")
    parser.text("log_dir", "Folder for the tasks' logs (default: a new one in /tmp).")
    flags.add_outputs(parser)
    parser.number("timeout", float, "Seconds after which the cluster is ended; 0: never.", 0.0)
    parser.number(
        "grace",
        float,
        "Seconds that tasks have after SIGTERM to save the job (BackupAndRestore).",
        0.0,
    )
    parser.number(
        "max_restarts",
        int,
        "How often the job is started again after a task has failed. With the BackupAndRestore "
        "callback it resumes at its last backup; KERAS_PSPLUS_RESTART counts the restarts.",
        0,
    )
    parser.choice(
        "restart",
        ["task", "job"],
        "What is started again: the worker that has failed, while the others go on (default in a "
        "cluster with a chief and parameter servers), or the job. Without a chief, `task` starts a "
        "parameter server again by itself, as HybridStrategy with sync=False and backups takes "
        "it in.",
    )
    parser.switch(
        "warm", "Start tasks as forks of a process that has imported TensorFlow and Keras (Linux)."
    )
    parser.switch(
        "verbose",
        "Show also what TensorFlow writes about itself, which is in the logs in any case.",
    )
    parser.choice(
        "output",
        flags.OUTPUTS,
        "Whose progress bars and summaries of models are shown (default: the chief's, or worker "
        "0's); all are in the logs.",
    )
    parser.switch("dry_run", "Print each task's environment and command, start nothing.")
    flags.add_hosts(parser)
    return parser


def _listing() -> str:
    """The catalogue's entries with a line each."""
    width = max(map(len, catalogue.ENTRIES)) + 2
    indent = " " * width
    return "\n".join(
        textwrap.fill(e.title, 100, initial_indent=name.ljust(width), subsequent_indent=indent)
        for name, e in catalogue.ENTRIES.items()
    )


def _recipe(
    argv: list[str],
    env: Mapping[str, str],
    layout: dict[str, Any],
    hosts: list[str] | None,
    gpus_per_worker: int | None,
) -> str:
    """The commands that start the cluster by hand, ready for a shell."""
    lines = []
    # A token of the user's own is not for the screen.
    needs_token = hosts and not os.environ.get(TOKEN_VARIABLE)
    token = {TOKEN_VARIABLE: secrets.token_hex(16)} if needs_token else {}
    for task in plan_tasks(**layout, hosts=hosts, gpus_per_worker=gpus_per_worker):
        variables = {**env, **token, **task.variables}
        lines.append(f"# {task.name} on {task.config.address or 'any host'}")
        lines.append(
            " ".join(
                [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
                + [shlex.join(argv)]
            )
        )
    return "\n".join(lines)
