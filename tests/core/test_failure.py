"""Which line of TensorFlow's errors says what has happened."""

import pytest

from keras_psplus.core.jobs import failure

SAYS = "ps-0 (localhost:1): no answer in time; it hangs, or the link is too slow"
WHERE = """Graph execution error:

Detected at node StatefulPartitionedCall defined at (most recent call last):
  File "job.py", line 148, in main
    model.fit(data)

"""


@pytest.mark.parametrize(
    "text, line",
    [
        (SAYS, SAYS),
        (f"{WHERE}{SAYS}\n\t [[{{{{node call}}}}]]", SAYS),
        (
            f"{WHERE}2 root error(s) found.\n(0) UNKNOWN: {SAYS}\n(1) CANCELLED: x",
            f"(0) UNKNOWN: {SAYS}",
        ),
        (
            f"{WHERE}Collective ops is aborted by: Socket closed",
            "Collective ops is aborted by: Socket closed",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_line_that_says_it(text, line):
    assert failure._first_line(RuntimeError(text)) == line
