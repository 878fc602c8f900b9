"""Dispatches `keras-psplus COMMAND ...` to the command's module."""

import importlib
import os
import sys
from collections.abc import Sequence

from keras_psplus import log, versions

_COMMANDS = {
    "run": "starts a script in every task of a cluster, here or on other hosts by ssh",
    "exec": "runs a script as the task that Slurm, MPI, torchrun or Kubernetes has started",
    "export": "prints a Kubernetes manifest of a job that trains a script",
    "plan": "says which strategy to take for a script, or how its model is cut into stages",
    "status": "shows the local jobs that are under way, and how far their tasks are",
    "add-worker": "starts one more worker of a job that is under way",
    "serve": "serves as a ps or worker task until the chief has ended",
    "doctor": "checks versions, devices, the cluster and the way to every task",
    "bench": "measures every strategy on emulated links, with the lab of a checkout",
}
# Started by `run --hosts`, and by nobody else.
_REMOTE_TASK = "remote-task"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; those of the process by
            default.

    Returns:
        The exit code.
    """
    _open_closed_streams()
    log.show()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["--version"], ["version"]):
        print(f"keras-psplus {versions.__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command not in (*_COMMANDS, _REMOTE_TASK):
        print(f"keras-psplus: no command {command!r}.\n\n{_help()}", file=sys.stderr)
        return 2
    # Imported when asked for: `run --help` must not wait for TensorFlow.
    module = importlib.import_module(f"keras_psplus.cli.{command.replace('-', '_')}")
    from keras_psplus.cli.flags import HelpShown, UsageError

    try:
        return module.main(rest)
    except HelpShown:
        return 0
    except UsageError as error:
        print(
            f"keras-psplus {command}: {error}\nkeras-psplus {command} --help shows the flags.",
            file=sys.stderr,
        )
        return 2


def _open_closed_streams() -> None:
    """Opens missing standard streams on the null device.

    Otherwise the next file that is opened would get what is meant for them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                null = os.open(os.devnull, os.O_RDWR)
                if null != number:
                    os.dup2(null, number)
                    os.close(null)
                os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def _help() -> str:
    lines = [f"  {name:<10} {text}" for name, text in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: keras-psplus COMMAND [flags] ...",
            "",
            *lines,
            "",
            "keras-psplus COMMAND --help shows a command's flags, --version the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
