"""What the chief waits for: closures that workers do not bring back, and updates on servers."""

import functools

from keras_psplus.cluster import stalls
from keras_psplus.cluster.stalls import Wait


class Waits:
    """What `stalls.Inspector` looks at, on the chief.

    Args:
        scheduler: `Scheduler`.
        progress: `Progress` of what the chief itself does.
        spec: Dict from jobs to lists of addresses.
    """

    def __init__(self, scheduler, progress, spec):
        self._scheduler, self._progress = scheduler, progress
        self._workers, self._servers = (
            {f"{job}-{i}": address for i, address in enumerate(spec[job])}
            for job in ("worker", "ps")
        )

    def look(self):
        """What is waited for just now."""
        waits = {
            (id(closure), closure.started): Wait(
                f"chief-0 at {closure.about}",
                functools.partial(self._of_closure, f"worker-{closure.tried_on}"),
                closure.started,
            )
            for closure in self._scheduler.closures
            if closure.started
        }
        doing, entered = self._progress.doing, self._progress.entered
        if doing is not None:
            waits[entered] = Wait(f"chief-0 at {doing}", self._of_update)
        return waits

    def _of_closure(self, worker):
        silent = stalls.silent({worker: self._workers[worker], **self._servers})
        if worker in silent:
            missing = f"{worker} (no answer; end its process, and another takes the closure)"
        elif silent:
            missing = f"{worker}, which is held up by {', '.join(silent)} (no answer)"
        else:
            missing = f"{worker}, which answers: it is slow, or has no data"
        return f"the closure; not arrived: {missing}"

    def _of_update(self):
        silent = stalls.silent(self._servers)
        missing = ", ".join(f"{name} (no answer)" for name in silent)
        return f"the update; not arrived: {missing or 'none, all parameter servers answer'}"
