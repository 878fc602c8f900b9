"""Runs the Python blocks of all pages; started by `test_python_blocks.py` as a script.

    python tests/docs/run_programs.py FOLDER [PAGE ...]

TensorFlow is imported once. Each task of each program is forked from this process, which has run
nothing of TensorFlow, and goes on as a script of its own would: as the only task, or as one of a
cluster, each with its own TF_CONFIG. Writes `results.json`, exit codes by program and task, and
each task's log beside it.
"""

import ast
import json
import os
import pathlib
import shlex
import signal
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import pytest

import keras_psplus
from keras_psplus.cli import flags, run
from keras_psplus.cluster.environment import plan_tasks
from keras_psplus.cluster.in_process import InProcessCluster
from keras_psplus.cluster.process.warm_server import Ending
from tests.docs import pages

TIMEOUT = 150  # seconds for a program
GRACE = 20  # seconds for the other tasks after a failure


def main(folder, wanted):
    """Runs all programs, or those of some pages, one after the other."""
    results, ending = {}, Ending()
    for number, program in enumerate(pages.programs()):
        if wanted and program.name.split(":")[0] not in wanted:
            continue
        directory = folder / str(number)
        directory.mkdir(parents=True)
        started = _start(program, directory, ending)
        if started is None:
            return  # in a forked task, which has done its work
        results[program.name] = {
            "directory": str(directory),
            "exit_codes": _wait(started),
        }
        print(program.name, results[program.name], flush=True)
    (folder / "results.json").write_text(json.dumps(results))


def _start(program, directory, ending):
    """Forks the program's tasks; returns their names by process, and None in a forked task."""
    started = {}
    for name, variables in _tasks(program):
        process = os.fork()
        if process == 0:
            _become(directory, name, variables)
            with ending.noted():
                _execute(program)
            return None
        started[process] = name
    return started


def _tasks(program):
    if not program.flags:
        return [("alone", {})]
    layout, _ = flags.read_layout(run._parser().read(shlex.split(program.flags)))
    return [(task.name, task.variables) for task in plan_tasks(**layout)]


def _become(directory, name, variables):
    os.chdir(directory)
    os.environ.update(variables)
    log = os.open(f"{name}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if not variables:
        _have_servers_in_threads()


def _have_servers_in_threads():
    """Lets `ParameterServerStrategy()` find a cluster without TF_CONFIG: threads of the process."""
    cluster, strategy = InProcessCluster(workers=2, ps=1), keras_psplus.ParameterServerStrategy

    def make(**arguments):
        cluster.start()
        return strategy(cluster.cluster_resolver, **arguments)

    keras_psplus.ParameterServerStrategy = make


def _execute(program):
    names = {"__name__": "__main__"}
    for block in program.blocks:
        print(f"--- {block.name}", flush=True)
        # Tracebacks show the page's own lines.
        code = "\n" * block.line + block.text
        if _defines_tests(code):
            file = pathlib.Path(f"test_line_{block.line}.py")
            file.write_text(code)
            if exit_code := pytest.main(["-q", "-p", "no:cacheprovider", str(file)]):
                sys.exit(int(exit_code))
        else:
            # As a reader copies it: by itself, unless it goes on from the blocks above.
            goes_on = block.hidden or pages.names(block)[1]
            scope = names if goes_on else {"__name__": "__main__"}
            exec(compile(code, str(block.page), "exec"), scope)
            names.update(scope)


def _defines_tests(code):
    return any(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for node in ast.parse(code).body
    )


def _wait(started):
    """Waits for all tasks, kills what does not end; returns exit codes by the tasks' names."""
    codes, end = {}, time.monotonic() + TIMEOUT
    while len(codes) < len(started):
        for process, name in started.items():
            if name in codes:
                continue
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[name] = os.waitstatus_to_exitcode(status)
                if codes[name]:
                    end = min(end, time.monotonic() + GRACE)
        time.sleep(0.05)
    return codes


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
