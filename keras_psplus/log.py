"""The library's logger: one line on stderr for each thing a user of a cluster should know."""

import logging

logger = logging.getLogger("keras_psplus")

if not logger.handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("keras_psplus: %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
