"""Says what a process waits for, and for whom, when that takes long."""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable

from keras_psplus.arguments import seconds
from keras_psplus.cluster import hello
from keras_psplus.log import logger

_LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS = 4, 5.0
_ANSWER_SECONDS = 2.0


def check(stall_warning):
    """Returns the argument `stall_warning`.

    Raises:
        ValueError: If it is neither None nor a positive number.
    """
    return seconds("stall_warning", stall_warning, or_none=True)


class Doubling:
    """When to say again that something takes long: at a limit, and at each doubling of it.

    Args:
        limit: Seconds; None for never.
    """

    def __init__(self, limit):
        self._next = float("inf") if limit is None else limit
        self.has_told = False

    def is_due(self, waited):
        """Whether it is to be said now, after so many seconds."""
        return waited >= self._next

    def note(self, waited):
        """Notes that it was said, after so many seconds."""
        self.has_told = True
        while self._next <= waited:
            self._next *= 2


@dataclasses.dataclass
class Wait:
    """Something that is waited for.

    Args:
        what: Who waits at which step, for people.
        describe: Function that says for what operation, and who has not arrived. It is called when
            it is told, and may take some seconds.
        since: `time.monotonic()` when it began; None for when it is first seen.
    """

    what: str
    describe: Callable[[], str]
    since: float | None = None


class Inspector:
    """Looks now and then, from a thread of its own, at what is waited for.

    Args:
        limit: Seconds after which a wait is told, and again after each doubling; None for never.
        look: Function that returns what is waited for just now, a dict from anything that tells
            waits apart to `Wait`s.
    """

    def __init__(self, limit, look):
        self._limit, self._look = limit, look
        self._known = {}
        if limit is not None:
            self.seconds = min(limit / _LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS)
            threading.Thread(target=self._run, name="stall inspector", daemon=True).start()

    def _run(self):
        while True:
            time.sleep(self.seconds)
            try:
                self._inspect(time.monotonic())
            except Exception as error:  # It must not end what it only watches.
                logger.warning("could not find out what is waited for: %s", error)

    def _inspect(self, now):
        waits = self._look()
        for key in [key for key in self._known if key not in waits]:
            wait, since, doubling = self._known.pop(key)
            if doubling.has_told:
                logger.warning("%s goes on after %.0f s", wait.what, now - since)
        for key, wait in waits.items():
            if key not in self._known:
                since = now if wait.since is None else wait.since
                self._known[key] = wait, since, Doubling(self._limit)
            _, since, doubling = self._known[key]
            if not doubling.is_due(now - since):
                continue
            described = wait.describe()
            if key in self._look():  # It may have come while others were asked.
                logger.warning("%s has waited %.0f s for %s", wait.what, now - since, described)
                doubling.note(now - since)


def silent(addresses):
    """Names of the tasks whose servers say nothing: they have died, hang or are cut off.

    Args:
        addresses: Dict from names to addresses of tasks that run one of gRPC's servers.
    """
    if not addresses:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(16, len(addresses))) as pool:
        answers = pool.map(lambda a: hello.speaks(a, _ANSWER_SECONDS), addresses.values())
    return [name for name, answers in zip(addresses, answers) if not answers]
