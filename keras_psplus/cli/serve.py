"""`keras-psplus serve`: a ps or worker task without a training script."""

import os
import sys

from keras_psplus.cli.flags import Parser, UsageError
from keras_psplus.cluster import environment
from keras_psplus.cluster.config import ClusterConfigError, ClusterStartupError
from keras_psplus.cluster.discovery.find import find_task_config

_USAGE = """
usage: keras-psplus serve [flags]

Serves as the ps or worker task that TF_CONFIG, or Slurm's or another launcher's variables, name
until the chief has ended. Exits with 0, or with 1 if the chief has died.
"""


def main(argv: list[str]) -> int:
    options = _parser().read_flags(argv)
    try:
        config = find_task_config()
        may_leave = environment.min_workers() is not None
    except ClusterConfigError as error:
        raise UsageError(str(error)) from None
    if config is None or config.task_type not in ("ps", "worker"):
        raise UsageError(
            "serve needs a TF_CONFIG whose task is a ps or a worker. "
            f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')!r}"
        )
    from keras_psplus.cluster.serving import serve  # not needed for --help
    from keras_psplus.errors import ChiefLostError

    try:
        serve(
            config,
            startup_timeout=options.startup_timeout,
            chief_gone=options.chief_gone,
            may_leave=may_leave and config.task_type == "worker",
        )
    except ClusterStartupError as error:
        print(f"keras-psplus serve: {error}", file=sys.stderr, flush=True)
        return 1
    except ChiefLostError as error:
        print(f"keras-psplus serve: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    # TensorFlow cannot stop a server; its threads would keep the process or crash its end.
    sys.stdout.flush()
    os._exit(0)


def _parser() -> Parser:
    parser = Parser(_USAGE)
    parser.number("startup_timeout", float, "Seconds to wait for the chief.", 300.0)
    parser.number(
        "chief_gone",
        float,
        "Seconds for which the chief cannot be reached before it counts as ended.",
        5.0,
    )
    return parser
