"""Rates of links, and what went over them.

The Python that has PyTorch imports this, too, and lacks this library.
"""

import pathlib
import re


def traffic(counters, device):
    """Bytes that a host has sent and received.

    Args:
        counters: `Lab.counters`.
        device: `Lab.device` of the host.
    """
    line = re.search(rf"^\s*{device}:(.*)", pathlib.Path(counters).read_text(), re.MULTILINE)
    # 8 numbers of what came to the switch's port, 8 of what went.
    numbers = [int(number) for number in line[1].split()]
    return numbers[0], numbers[8]


def parse_rate(text):
    """Bits per second of `"100mbit"`, `"1gbit"` and the like; None of `"loopback"`.

    Raises:
        ValueError: If it is something else.
    """
    match = re.fullmatch(r"([\d.]+)([kmg]?)bit", text)
    if text != "loopback" and not match:
        raise ValueError(f"A rate is '100mbit', '1gbit' or 'loopback'. Received: {text!r}")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else None
