"""Signals that end a cluster: SIGINT, SIGTERM and SIGHUP of its launcher."""

from __future__ import annotations

import signal
import threading
from typing import Any


class EndingSignals:
    """Notes the signals, in the main thread, unless they are ignored, as under nohup.

    Attributes:
        received: Their numbers, in the order in which they have come.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._old_handlers: dict[signal.Signals, Any] = {}

    def catch(self) -> None:
        """Notes them from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Has them do what they did before."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}

    def _note(self, number: int, _: object) -> None:
        self.received.append(number)
