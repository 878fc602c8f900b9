"""Names variables that a script sets too late, where TensorFlow was imported before it began."""

import sys
from collections.abc import Mapping

from keras_psplus.cluster.process.warm_server import WARM_START
from keras_psplus.log import logger

# It only decides what TensorFlow says of itself.
_HARMLESS = "TF_CPP_MIN_LOG_LEVEL"


def warn(environ: Mapping[str, str]) -> None:
    """Warns of variables of TensorFlow that this process's script has set, if it started warm.

    Args:
        environ: The environment when the script had imported this library.
    """
    if WARM_START not in sys.modules:
        return
    before = sys.modules[WARM_START].environ
    names = {n for n in {*before, *environ} if n.startswith("TF_") and n != _HARMLESS}
    late = sorted(name for name in names if before.get(name) != environ.get(name))
    if late:
        logger.warning(
            "%s: set or changed by the script, after TensorFlow was imported for it (`--warm`). "
            "What TensorFlow reads then has to be set before the launcher is started. "
            "Received: %s",
            ", ".join(late),
            ", ".join(f"{name}={environ.get(name)}" for name in late),
        )
