"""Many processes' output on one console: whole lines with a prefix, one live progress bar."""

import codecs
import os
import re
import shutil
import sys
import threading
import time

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.", re.DOTALL)
_REDRAW_EVERY = 0.1


def render(text):
    """Returns a line as a terminal would show it after all its `\\r` and `\\b`.

    Example:

    ```python
    render("step 1\\b\\b\\b\\b\\b\\b\\rstep 2")  # "step 2"
    ```

    Args:
        text: One line without its newline; colour escapes are kept.

    Returns:
        The visible text, without trailing spaces.
    """
    if "\r" not in text and "\b" not in text:
        return text.rstrip()
    cells, column, style = [], 0, ""
    for token in _TOKEN.findall(text):
        if token == "\r":
            column = 0
        elif token == "\b":
            column = max(0, column - 1)
        elif token.startswith("\x1b"):
            style += token  # belongs to the cell that follows
        else:
            cells[column : column + 1] = [style + token]
            column, style = column + 1, ""
    return "".join(cells).rstrip() + style


def plain(text):
    """Returns a line without colour escapes, as it goes into a log file."""
    return _ESCAPE.sub("", render(text)).rstrip()


class Console:
    """Writes the tasks' lines to one stream, from many threads.

    Complete lines appear as `[worker-1] text`. On a terminal, the unfinished
    line of the live task (its progress bar) stays at the bottom and is redrawn
    as it changes; elsewhere only complete lines are written.

    Args:
        stream: A text stream; `sys.stdout` by default.
        live: Name of the task whose unfinished line is shown.
    """

    def __init__(self, stream=None, live=None):
        self._stream = stream or sys.stdout
        terminal = self._stream.isatty()
        self._live = live if terminal else None
        self._render = render if terminal else plain  # no colours in files and pipes
        self._lock = threading.Lock()
        self._shown = False  # whether an unfinished line is on the screen
        self._partial = ""
        self._drawn_at = 0.0

    def line(self, task, text):
        """Writes a complete line of a task."""
        with self._lock:
            self._erase()
            self._write(f"[{task}] {self._render(text)}\n")
            if task == self._live:
                self._partial = ""
            self._draw()

    def partial(self, task, text):
        """Shows the unfinished line of the live task; other tasks' is ignored."""
        if task != self._live:
            return
        with self._lock:
            self._partial = text
            if time.monotonic() - self._drawn_at >= _REDRAW_EVERY:
                self._erase()
                self._draw()

    def note(self, text):
        """Writes a line of the launcher's own."""
        with self._lock:
            self._erase()
            self._write(f"{text}\n")
            self._draw()

    def _erase(self):
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _draw(self):
        text = render(self._partial) if self._partial else ""
        if text:
            width = shutil.get_terminal_size().columns - 1
            self._write(_clip(f"[{self._live}] {text}", width))
            self._shown = True
            self._drawn_at = time.monotonic()

    def _write(self, text):
        try:
            self._stream.write(text)
            self._stream.flush()
        except UnicodeEncodeError:  # a console without the progress bar's characters
            encoding = self._stream.encoding or "ascii"
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (BrokenPipeError, ValueError):
            pass  # nobody reads any more: the cluster and its log files go on


class OutputPump(threading.Thread):
    """Copies one process's output, line by line, to its log file and the console.

    Args:
        task: The task's name.
        pipe: File descriptor or binary file to read from.
        log: Text file to write to.
        console: A `Console`, or `None`.
    """

    def __init__(self, task, pipe, log, console=None):
        super().__init__(name=f"output of {task}", daemon=True)
        self._task, self._pipe, self._log, self._console = task, pipe, log, console
        self._pending = ""

    def run(self):
        """Reads until the last writer has closed the pipe."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            try:
                data = os.read(self._pipe.fileno(), 65536)
            except (OSError, ValueError):
                data = b""
            self._feed(decoder.decode(data, final=not data))
            if not data:
                break
        if self._pending:
            self._line(self._pending)
        self._pending = ""

    def _feed(self, text):
        *lines, rest = (self._pending + text).split("\n")
        for line in lines:
            self._line(line)
        # A progress bar writes one endless line: keep what a terminal would still show.
        self._pending = render(rest) if len(rest) > 4096 and "\r" in rest else rest
        if self._pending and self._console is not None:
            self._console.partial(self._task, self._pending)

    def _line(self, line):
        line = line.removesuffix("\r")
        self._log.write(plain(line) + "\n")
        self._log.flush()
        if self._console is not None:
            self._console.line(self._task, line)


def _clip(text, width):
    """Cuts a line to the screen's width: a wrapped line could not be erased."""
    out, columns = [], 0
    for token in _TOKEN.findall(text):
        if not token.startswith("\x1b"):
            if columns >= width:
                return "".join(out) + "\x1b[0m"
            columns += 1
        out.append(token)
    return "".join(out)
