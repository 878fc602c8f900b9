"""Present faults of the links of a cluster's tasks."""

import threading
from collections.abc import Sequence

from keras_psplus.chaos.netlab import Lab
from keras_psplus.chaos.spec import Event

KINDS = ("cut", "delay")


class LinkFaults:
    """Overlapping faults of links.

    Delays add up, and a link is up when no cut is left.

    Args:
        tasks: Names of the tasks, in the order of the network's hosts.
    """

    def __init__(self, network: Lab | None, tasks: Sequence[str]) -> None:
        self._network, self._ranks = network, {name: rank for rank, name in enumerate(tasks)}
        self._present: list[Event] = []
        self._lock = threading.Lock()

    def begin(self, event: Event) -> None:
        """Does an event of one of `KINDS` to its task's link."""
        with self._lock:
            self._present.append(event)
            self._apply(event)

    def end(self, event: Event) -> None:
        """Takes it back."""
        with self._lock:
            self._present.remove(event)
            self._apply(event)

    def _apply(self, changed: Event) -> None:
        assert self._network is not None
        rank = self._ranks[changed.task]
        same = [e for e in self._present if (e.task, e.kind) == (changed.task, changed.kind)]
        if changed.kind == "cut":
            self._network.set_link(rank, up=not same)
        else:
            self._network.set_delay(rank, sum(event.ms or 0.0 for event in same) / 1e3)
