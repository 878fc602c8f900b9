"""How the library's own lines are written."""

import io
import logging

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


def test_the_library_writes_so():
    assert [type(handler) for handler in log.logger.handlers][:1] == [log._Handler]
