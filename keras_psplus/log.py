"""Logger of the library, which writes one line on stderr per event."""

import logging
from typing import Any

logger = logging.getLogger("keras_psplus")

_logged: set[str] = set()


class _Handler(logging.StreamHandler):
    """Handler that writes whole lines, also while Keras's progress bar is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:
            return  # The process was started without a stderr.
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")  # the bar is drawn again with the next step
        super().emit(record)


if not logger.handlers:
    _handler = _Handler()
    _handler.setFormatter(logging.Formatter("keras_psplus: %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def info_once(message: str, *args: Any) -> None:
    """Logs a line the first time that this process has it."""
    _log_once(logging.INFO, message % args)


def warn_once(message: str, *args: Any) -> None:
    """Logs a warning the first time that this process has it."""
    _log_once(logging.WARNING, message % args)


def _log_once(level: int, line: str) -> None:
    if line not in _logged:
        _logged.add(line)
        logger.log(level, "%s", line)
