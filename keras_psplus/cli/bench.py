"""`keras-psplus bench`: the benchmark lab of a checkout."""

import os
import pathlib
import subprocess
import sys

from keras_psplus.cluster.environment import python_path

_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_USAGE = """usage: keras-psplus bench [flags of benchmarks/bench.py]

Runs the benchmark lab, benchmarks/bench.py of the checkout that keras_psplus is imported from.
There is none here: get a checkout of keras_psplus's repository, install it with
`pip install -e ".[bench]"`, and ask again for the flags.
"""


def main(argv: list[str], checkout: str | os.PathLike[str] = _CHECKOUT) -> int:
    """Runs the command.

    Args:
        argv: Arguments after `bench`, passed on.

    Returns:
        The lab's exit code; 2 if it is not there.
    """
    script = pathlib.Path(checkout) / "benchmarks" / "bench.py"
    if not script.is_file():
        if argv[:1] in (["--help"], ["-h"]):
            print(_USAGE)
            return 0
        print(
            "keras-psplus bench: the benchmark lab is not in the installed package. Get a checkout "
            "of keras_psplus's repository, install it with `pip install -e '.[bench]'`, and run "
            f"this again. Received: no {script}",
            file=sys.stderr,
        )
        return 2
    return subprocess.run(
        [sys.executable, str(script), *argv],
        env={**os.environ, "PYTHONPATH": python_path()},
        check=False,
    ).returncode
