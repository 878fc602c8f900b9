"""How the library's own lines are written."""

import io
import logging
import subprocess
import sys

import pytest

from keras_psplus import log


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_on_a_terminal_takes_the_place_of_a_progress_bar(terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    handler = log._Handler(stream)
    stream.write(" 3/10 ━━━")
    handler.emit(logging.LogRecord("x", logging.INFO, "f", 1, "waits", (), None))
    assert stream.getvalue() == " 3/10 ━━━" + "\r\x1b[K" * terminal + "waits\n"


SCRIPT = """
import absl.logging, logging, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras_psplus as psp
from keras_psplus.log import logger

when = sys.argv[1]
assert [type(one) for one in logger.handlers] == [logging.NullHandler]
assert (logger.level, logger.propagate) == (logging.NOTSET, True)
logger.warning("nobody is shown this")
if when == "absl":
    absl.logging.warning("of a library")
if when == "before":
    logging.basicConfig(format="their own: %(message)s", level="INFO")
psp.MultiWorkerMirroredStrategy()
absl.logging.warning("of a library, later")
if when == "after":
    logging.basicConfig(format="their own: %(message)s", level="INFO")
logger.info("a line")
psp.MultiWorkerMirroredStrategy()
logger.warning("another")
"""


@pytest.mark.parametrize("when", ["never", "absl", "before", "after"])
def test_lines_are_shown_once_from_the_first_strategy_on(when, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), when]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    prefix = "their own: " if when == "before" else "keras_psplus: "
    shown = [line for line in result.stderr.splitlines() if line.endswith(("a line", "another"))]
    assert shown == [f"{prefix}a line", f"{prefix}another"]
    assert "nobody is shown this" not in result.stderr
