"""Runs a command that ends when its parent does: `exec_with_parent.py PARENT_PID COMMAND...`.

A program of its own and no `preexec_fn`: Python code between fork and exec can
deadlock in a process with threads, and TensorFlow has many.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel for SIGKILL at the parent's death and becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)  # it died before the request
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python had it ignored; exec would keep that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"keras-psplus: cannot start {command[0]!r}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
