"""Filter for log lines of TensorFlow's runtime in a task's output.

Before the first epoch TensorFlow writes some fifteen lines in each process, one of them an error
about CUDA on machines without a GPU. They stay in the log files.
"""

import os
import re

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
# What each collective under way says when one has failed, which an exception says as well.
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
