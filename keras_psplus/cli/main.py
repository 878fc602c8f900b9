"""Dispatches `keras-psplus COMMAND ...` to the command's module."""

import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "run": "starts a script in every task of a local cluster, or prints how to on other hosts",
    "exec": "runs a script as the task that Slurm, MPI, torchrun or Kubernetes has started",
    "export": "prints a Kubernetes manifest of a job that trains a script",
    "plan": "says which strategy to take for a script, or how its model is cut into stages",
    "status": "shows the local jobs that are under way, and how far their tasks are",
    "serve": "serves as a ps or worker task until the chief has ended",
    "doctor": "checks versions, devices, the cluster and the way to every task",
    "bench": "measures every strategy on emulated links, with the lab of a checkout",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; those of the process by
            default.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command not in _COMMANDS:
        print(f"keras-psplus: no command {command!r}.\n\n{_help()}", file=sys.stderr)
        return 2
    # Imported when asked for: `run --help` must not wait for TensorFlow.
    return importlib.import_module(f"keras_psplus.cli.{command}").main(rest)


def _help():
    lines = [f"  {name:<8} {text}" for name, text in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: keras-psplus COMMAND [flags] ...",
            "",
            *lines,
            "",
            "keras-psplus COMMAND --help shows a command's flags.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
