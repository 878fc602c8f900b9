"""`keras-psplus serve`: a ps or worker task without a training script."""

import os
import sys
from typing import Any

from absl import flags

from keras_psplus.cli import command_flags
from keras_psplus.cluster import environment
from keras_psplus.cluster.config import ClusterConfigError, ClusterStartupError
from keras_psplus.cluster.discovery.find import find_task_config

_USAGE = """
usage: keras-psplus serve [flags]

Serves as the ps or worker task that TF_CONFIG, or Slurm's or another launcher's variables, name
until the chief has ended. Exits with 0, or with 1 if the chief has died.
"""


def main(argv: list[str]) -> int:
    options = _flags()
    if command_flags.shows_help(_USAGE, options, argv):
        return 0
    try:
        if command_flags.parse(options, argv):
            raise command_flags.UsageError("serve takes no arguments, only flags")
        config = find_task_config()
        if config is None or config.task_type not in ("ps", "worker"):
            raise command_flags.UsageError(
                "serve needs a TF_CONFIG whose task is a ps or a worker. "
                f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')!r}"
            )
        may_leave = environment.min_workers() is not None and config.task_type == "worker"
    except (command_flags.UsageError, ClusterConfigError) as error:
        return command_flags.complain("serve", error)
    from keras_psplus.cluster.serving.serve import serve  # not needed for --help
    from keras_psplus.errors import ChiefLostError

    try:
        serve(
            config,
            startup_timeout=options.startup_timeout,
            chief_gone=options.chief_gone,
            may_leave=may_leave,
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


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    seconds: dict[str, Any] = {"flag_values": values, "lower_bound": 0.0}
    flags.DEFINE_float("startup_timeout", 300.0, "Seconds to wait for the chief.", **seconds)
    flags.DEFINE_float(
        "chief_gone",
        5.0,
        "Seconds for which the chief cannot be reached before it counts as ended.",
        **seconds,
    )
    return values
