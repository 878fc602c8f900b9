"""Scripts that tests run, in one process or in a cluster, and what their output must not have."""

import os
import pathlib
import re
import subprocess
import sys
import time

from keras_psplus.cluster import testing
from keras_psplus.cluster.environment import python_path

# Ends of jobs that Python tells of, though the exit code is 0.
TROUBLE = re.compile(
    r"^(\[\S+\] )?(Traceback \(most recent call last\)|Exception ignored )", re.MULTILINE
)

# In front of the code of a child that needs no TensorFlow: as in the launcher, the library imports
# none.
WITHOUT_TENSORFLOW = "import sys; sys.argv[0] = 'keras-psplus'\n"


def environment(**extra):
    """Environment variables of a child: this process's, without a cluster or GPUs."""
    own = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    own |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    own |= {name: str(value) for name, value in extra.items()}
    return own | {"PYTHONPATH": python_path(own)}


def check_output(text, tail=8000):
    """Fails if the output of a job that ended well tells of an error that nobody saw."""
    found = TROUBLE.search(text)
    assert not found, f"A job that ended well shows an error:\n{text[found.start() :][:tail]}"


def run_script(path, *args, timeout=600, may_show_errors=False, **env):
    """Runs a Python script in one process, and fails unless it ends well.

    Args:
        path: The script.
        *args: Its arguments.
        timeout: Seconds after which it is killed.
        may_show_errors: Whether its output may show tracebacks.
        **env: Further environment variables.

    Returns:
        Its output, that on the standard error included.
    """
    return _run([path, *args], 0, timeout, may_show_errors, env)


def launch(*flags, faults=None, exit_code=0, timeout=600, may_show_errors=False, **env):
    """Runs `keras-psplus run`, and fails unless it ends with an exit code.

    Args:
        *flags: Its flags, the script, and the script's arguments.
        faults: What is put into the job, as `tests/lab/run.py` takes it.
        exit_code: The exit code.
        timeout: Seconds after which it is killed.
        may_show_errors: Whether the output may show tracebacks; that of a job that fails may.
        **env: Further environment variables.

    Returns:
        The output, that on the standard error included.
    """
    command = ["keras_psplus", "run"] if faults is None else ["tests.lab.run", faults]
    return _run(["-m", *command, *flags], exit_code, timeout, may_show_errors or exit_code, env)


def _run(arguments, exit_code, timeout, may_show_errors, env):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    assert done.returncode == exit_code, f"Exit code {done.returncode}:\n{done.stdout[-8000:]}"
    if not may_show_errors:
        check_output(done.stdout)
    return done.stdout


def run_in_processes(script, *args, env=None, timeout=560, may_show_errors=False, **kwargs):
    """Runs `cluster.testing.run_in_processes`, and looks at what a job that ends well prints.

    Args:
        script: As there.
        *args: The script's arguments.
        env: Further environment variables.
        timeout: Seconds after which all are killed.
        may_show_errors: Whether tasks may show tracebacks; a job that has to fail may.
        **kwargs: As there.

    Returns:
        The `ClusterResult`.
    """
    args = args or kwargs.pop("args", ())
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **(env or {})}
    result = testing.run_in_processes(script, args=args, env=env, timeout=timeout, **kwargs)
    if not may_show_errors and not kwargs.get("expect_failure"):
        for log in result.logs.values():
            check_output(log)
    return result


def wait_for(condition, seconds=60, what="what the test waits for", shown=lambda: ""):
    """Waits until a condition holds, and returns its value; fails after some seconds.

    Args:
        condition: A function, or a file's path and a text, which the file is to have.
        seconds: How long to wait.
        what: Said in the failure.
        shown: A function whose value the failure shows, such as a log.
    """
    if isinstance(condition, tuple):
        path, text = pathlib.Path(condition[0]), condition[1]

        def condition():
            return path.exists() and text in path.read_text(errors="replace")

        what = f"{text!r} in {path.name}"

        def shown():
            return path.read_text(errors="replace")[-4000:] if path.exists() else "no file"

    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"Not there after {seconds} s: {what}\n{shown()}"
        time.sleep(0.05)
    return value
