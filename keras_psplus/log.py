"""Logger of the library, which writes one line on stderr per event.

Importing the library changes nothing of a program's logging. The first strategy, the command line
and whatever else begins the library's work show the lines, unless the program has handlers of its
own: then these decide what is shown, and how.
"""

import logging
from typing import Any, TextIO

logger = logging.getLogger("keras_psplus")
logger.addHandler(logging.NullHandler())

_logged: set[str] = set()


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that writes whole lines, also while Keras's progress bar is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:
            return  # The process was started without a stderr.
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")  # the bar is drawn again with the next step
        super().emit(record)


def show() -> None:
    """Shows the library's lines on stderr, from INFO on, unless the program has handlers."""
    own = [one for one in logger.handlers if not isinstance(one, logging.NullHandler)]
    if own or _shows_by_itself():
        return
    handler = _Handler()
    handler.setFormatter(logging.Formatter("keras_psplus: %(message)s"))
    logger.addHandler(handler)
    # Or they would come twice, as soon as something that TensorFlow says makes absl a handler.
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def _shows_by_itself() -> bool:
    """Whether the program has configured logging, by more than a `basicConfig` without arguments.

    absl calls that when TensorFlow or Keras has something to say.
    """
    root = logging.getLogger()
    plain = [one for one in root.handlers if type(one) is logging.StreamHandler]
    if len(plain) < len(root.handlers) or root.level != logging.WARNING:
        return bool(root.handlers)
    return any(getattr(one.formatter, "_fmt", None) != logging.BASIC_FORMAT for one in plain)


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
