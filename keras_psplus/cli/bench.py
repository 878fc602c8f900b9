"""`keras-psplus bench`: the benchmarks of a checkout."""

import os
import pathlib
import subprocess
import sys

from keras_psplus.cluster.environment import python_path

_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_USAGE = """usage: keras-psplus bench [flags of benchmarks/step_time.py]

Runs benchmarks/step_time.py of the checkout that keras_psplus is imported from.
"""


def main(argv, checkout=_CHECKOUT):
    """Runs the command.

    Args:
        argv: Arguments after `bench`, passed on.
        checkout: The checkout's folder.

    Returns:
        The benchmark's exit code; 2 if it is not there.
    """
    script = pathlib.Path(checkout) / "benchmarks" / "step_time.py"
    if not script.is_file():
        if argv[:1] in (["--help"], ["-h"]):
            print(_USAGE)
            return 0
        print(
            "keras-psplus bench: the benchmarks are not in the installed package. Get a checkout "
            "of keras_psplus's repository, install it with `pip install -e .`, and run this again. "
            f"Received: no {script}",
            file=sys.stderr,
        )
        return 2
    return subprocess.run(
        [sys.executable, str(script), *argv],
        env={**os.environ, "PYTHONPATH": python_path()},
        check=False,
    ).returncode
