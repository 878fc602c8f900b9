"""Many processes' output on one console: whole lines with a prefix, one live progress bar."""

import codecs
import collections
import contextlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

from keras_psplus.cluster.config import EVALUATOR

# A task's log file, also on a disk that is full.

_KEPT_LINES, _KEPT_CHARACTERS = 200, 4000


class LogFile:
    """Writes text to a file; a file that cannot be written stops nobody.

    The last lines that the file did not take are kept in memory, so that the end of a task's output
    is known in any case.

    Args:
        append: Whether the file goes on with what it holds.
        warn: Function that is called with a line of text the first time that a write fails.
        heading: Text to begin with, which `size` counts.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        append: bool,
        warn: Callable[[str], None],
        heading: str = "",
    ) -> None:
        self._path, self._warn = path, warn
        # Without a buffer there is nothing left that closing it would have to write.
        self._file = open(path, "ab" if append else "wb", buffering=0)
        self._has_failed = False
        self._lost: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.write(heading)
        self.size = os.fstat(self._file.fileno()).st_size

    @property
    def lost(self) -> str:
        """The last lines that are not in the file, as one text."""
        return "".join(self._lost)

    def write(self, text: str) -> None:
        """Writes a line, or a part of one that is very long."""
        data = text.encode("utf-8", "replace")
        try:
            while data:
                data = data[self._file.write(data) :]
        except (OSError, ValueError) as error:
            self._lost.append(text[-_KEPT_CHARACTERS:])
            if not self._has_failed:
                self._has_failed = True
                self._warn(
                    f"cannot write {self._path} ({error}); the job goes on, and what the file "
                    "lacks is on the console only"
                )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


# Filter for log lines of TensorFlow's runtime in a task's output.
#
# Before the first epoch TensorFlow writes some fifteen lines in each process, one of them an error
# about CUDA on machines without a GPU. They stay in the log files.

_GPU_DRIVER = "/dev/nvidiactl"
# "I0000 00:00:1795460916.566899   25504 port.cc:153] text", and as other loggers begin a line,
# "2026-11-23 18:58:38.123456: I tensorflow/core/platform/port.cc:153] text".
_HEAD = (
    r"(?:(?P<level>[IWEF])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |"
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<other>[IWEF]) )"
    r"(?P<file>[\w./-]+\.(?:cc|cu|h)):\d+\] "
)
_LINE = re.compile(_HEAD)
_MID_LINE = re.compile(f"(?<=.)(?:{_HEAD}|WARNING:(?:absl|tensorflow):)")
_MID_BAR = re.compile(r"(?<=.)keras_psplus: ")
_ALONE = ("WARNING: All log messages before absl::InitializeLog() is called",)
# Errors that say that there is no GPU, or that each CUDA library was linked twice.
_OF_CUDA = re.compile(r"failed call to cuInit|Unable to register cu\w+ factory|computation placer")
# Lines of each collective under way when one has failed, which an exception says as well.
_OF_ABORTION = ("base_collective_executor.cc", "ring_alg.cc", "ring_gatherer.cc")
# Second and further lines.
_CONTINUED = re.compile(
    r"To enable the following instructions: |Additional GRPC error information from |"
    r":UNKNOWN:|The error could be from a previous operation\. Restart your program|"
    r"\t \[\[|/job:\w+/(?:replica:\d+/)?task:\d+$"
)
_OF_OPTIONS = re.compile(r" *(?:\w+ \{|\}|\w+: \S.*)?$")


class NoiseFilter:
    """Tells TensorFlow's lines from those of one task's script.

    Lines of the levels info and warning count as noise, errors and fatal ones do not, but for those
    that say that there is no GPU (where there is no driver) and those that an exception repeats.
    """

    def __init__(self) -> None:
        self._after: str | None = None  # the file of the line of noise before

    def is_noise(self, line: str) -> bool:
        """Whether a line is noise; lines are to come in order.

        Args:
            line: Text without colours and newline.
        """
        found = _LINE.match(line)
        if found is None:
            if line.startswith(_ALONE):
                return True
            if self._after and (
                _CONTINUED.match(line) or (self._after == "options" and _OF_OPTIONS.match(line))
            ):
                return True
            self._after = None
            return False
        file, text = os.path.basename(found["file"]), line[found.end() :]
        level = found["level"] or found["other"]
        if level in "IW" or file in _OF_ABORTION or (level == "E" and _is_of_no_gpu(text)):
            self._after = "options" if text.startswith("SessionOptions: ") else file
            return True
        self._after = None
        return False


_OF_KERAS = re.compile(
    r" *\d+/(?:\d+|Unknown) .*\d(?:s|ms|us)/(?:step|epoch)\b.*|Epoch \d+/\d+|"
    r'Model: ".*"|[┏┃┡│├└].*[┓┃┩│┤┘]| (?:Total|Trainable|Non-trainable|Optimizer) params: [\d,]+ .*'
)


def is_of_keras(text: str) -> bool:
    """Whether a line is of a progress bar or of `model.summary()`."""
    return bool(_OF_KERAS.fullmatch(text))


def log_line_in(text: str) -> int | None:
    """Finds a line of a log that another thread has written into an unfinished line.

    Args:
        text: A line as it was written, a progress bar's `\\r` and `\\b` included.

    Returns:
        Where it begins; None if there is none.
    """
    found = _MID_LINE.search(text)
    if found is None and ("\r" in text or "\b" in text):
        found = _MID_BAR.search(text)
    return None if found is None else found.start()


def _is_of_no_gpu(text: str) -> bool:
    return bool(_OF_CUDA.search(text)) and not os.path.exists(_GPU_DRIVER)


_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.", re.DOTALL)
_CONTROL = re.compile("[\r\b\x1b]")
_REDRAW_EVERY = 0.1
# A line that goes on beyond this is taken in parts of about this length.
_LONGEST_LINE = 1 << 20
_LONGEST_BAR = 4096


def render(text: str) -> str:
    """Returns a line as a terminal would show it after all its `\\r` and `\\b`.

    Example:

    ```python
    render("step 1\\b\\b\\b\\b\\b\\b\\rstep 2")  # "step 2"
    ```
    """
    if "\r" not in text and "\b" not in text:
        return text.rstrip()
    cells: list[str] = []
    column, style = 0, ""
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


def plain(text: str) -> str:
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
        quiet: Whether what TensorFlow writes about itself is left to the log
            files.
        leader: Name of the task whose progress bars and summaries of models are shown, and of the
            others are left to the log files; None for those of all.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        live: str | None = None,
        quiet: bool = False,
        leader: str | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self.quiet, self.leader = quiet, leader
        terminal = self._stream.isatty()
        self._live = live if terminal else None
        self._render = render if terminal else plain  # no colours in files and pipes
        self._lock = threading.Lock()
        self._shown = False  # whether an unfinished line is on the screen
        self._partial = ""
        self._drawn_at = 0.0
        self._has_failed = self._is_gone = False

    def line(self, task: str, text: str) -> None:
        with self._lock:
            self._erase()
            self._write(f"[{task}] {self._render(text)}\n")
            if task == self._live:
                self._partial = ""
            self._draw()

    def partial(self, task: str, text: str) -> None:
        """Shows the unfinished line of the live task; other tasks' is ignored."""
        if task != self._live:
            return
        with self._lock:
            self._partial = text
            if time.monotonic() - self._drawn_at >= _REDRAW_EVERY:
                self._erase()
                self._draw()

    def note(self, text: str) -> None:
        """Writes a line of the launcher's own."""
        with self._lock:
            self._erase()
            self._write(f"{text}\n")
            self._draw()

    def warn(self, text: str) -> None:
        """Writes a line of the launcher's own to stderr."""
        with self._lock:
            self._erase()
            warn(text)
            self._draw()

    def _erase(self) -> None:
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _draw(self) -> None:
        text = render(self._partial) if self._partial else ""
        if text:
            width = shutil.get_terminal_size().columns - 1
            self._write(_clip(f"[{self._live}] {text}", width))
            self._shown = True
            self._drawn_at = time.monotonic()

    def _write(self, text: str) -> None:
        if self._is_gone:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # a console without the progress bar's characters
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError) as error:  # nobody reads any more, or the disk is full
            self._is_gone = isinstance(error, (BrokenPipeError, ValueError))
            if not self._has_failed:
                self._has_failed, self._shown = True, False
                warn(
                    f"cannot write to the standard output ({error}); the job goes on, and its "
                    "output is in the log files"
                )


def warn(text: str) -> None:
    """Writes a line of the launcher's own to stderr, if that can be written to."""
    with contextlib.suppress(OSError, ValueError):
        print(f"keras-psplus: {text}", file=sys.stderr, flush=True)


def drop_unwritten(*streams: TextIO) -> None:
    """Drops output that streams cannot write.

    Python's exit would fail on it, with exit code 120.
    """
    for stream in streams:
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


class OutputPump(threading.Thread):
    """Copies one process's output, line by line, to its log file and the console."""

    def __init__(
        self, task: str, pipe: IO[bytes], log: LogFile | TextIO, console: Console | None = None
    ) -> None:
        super().__init__(name=f"output of {task}", daemon=True)
        self._task, self._pipe, self._log, self._console = task, pipe, log, console
        self._noise = NoiseFilter() if console is not None and console.quiet else None
        leader = None if console is None else console.leader
        self._has_bars = leader is None or task == leader or task.startswith(EVALUATOR)
        self._has_failed = False
        self._parts: list[str] = []
        self._length, self._has_return = 0, False

    def run(self) -> None:
        """Reads until the last writer has closed the pipe."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        data: bytes | bool = True
        while data:
            try:
                data = os.read(self._pipe.fileno(), 65536)
            except (OSError, ValueError):
                data = b""
            try:
                self._feed(decoder.decode(data, final=not data))
                while not data and self._length:
                    self._end_line("\n")
            except Exception as error:  # A task whose output nobody reads would stand still.
                self._start_line()
                if not self._has_failed:
                    self._has_failed = True
                    warn(f"lost some of the output of {self._task}: {error!r}; the job goes on")

    def _feed(self, text: str) -> None:
        *lines, rest = text.split("\n")
        for line in lines:
            self._add(line)
            self._end_line("\n")
        self._add(rest)
        if self._length > _LONGEST_BAR and self._has_return:
            # A progress bar writes one endless line: keep what a terminal would still show.
            shown = render("".join(self._parts))
            self._start_line()
            self._add(shown)
        if self._length > _LONGEST_LINE:
            self._end_line("")
        if 0 < self._length <= _LONGEST_BAR and self._console is not None:
            self._parts = ["".join(self._parts)]
            self._console.partial(self._task, self._parts[0])

    def _start_line(self) -> None:
        self._parts, self._length, self._has_return = [], 0, False

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._length += len(text)
            self._has_return = self._has_return or "\r" in text

    def _end_line(self, end: str) -> None:
        line = "".join(self._parts).removesuffix("\r")
        self._start_line()
        start = log_line_in(line) if end else None
        if start is not None:
            # The line that it was written into, a progress bar as a rule, goes on.
            self._add(line[:start])
            line = line[start:]
        text = plain(line)
        # The end of a part may be a space that belongs to the line.
        self._log.write(text + end if end or _CONTROL.search(line) else line)
        if self._console is None:
            return
        is_noise = self._noise is not None and self._noise.is_noise(text)
        if not is_noise and (self._has_bars or not is_of_keras(text)):
            self._console.line(self._task, line)
        else:
            self._console.partial(self._task, "")  # its beginning may have come before


def _clip(text: str, width: int) -> str:
    """Cuts a line to the screen's width: a wrapped line could not be erased."""
    out: list[str] = []
    columns = 0
    for token in _TOKEN.findall(text):
        if not token.startswith("\x1b"):
            if columns >= width:
                return "".join(out) + "\x1b[0m"
            columns += 1
        out.append(token)
    return "".join(out)
