"""Automatic choice of a cluster's entry: the fastest that trains exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from keras_psplus.planning import choices
from keras_psplus.planning.choices import Facts
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.traits import Traits


class NoPlanError(ValueError):
    """There are several to choose from, and nothing is known of the model."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The chosen entry.

    Attributes:
        entry: Its name in the catalogue.
        reason: The reason, in one line.
    """

    entry: str
    reason: str

    def __str__(self) -> str:
        return f"auto: {self.entry}, {self.reason}"


def choose(
    facts: Facts | None,
    link: Cluster,
    entries: Mapping[str, Traits],
    *,
    workers: int,
    ps: int,
    chief: bool,
) -> Chosen:
    """Chooses for a cluster.

    Args:
        facts: What was measured of the model; None if nothing was.
        link: `Cluster` with the links; its numbers of tasks do not count.
        entries: Dict from the names of the catalogue's entries to their traits.

    Raises:
        NoPlanError: If more than one entry can be taken, and `facts` is None.
        ValueError: If none can.
    """
    numbers = {
        name: _trainers(traits.path, workers, ps, chief)
        for name, traits in entries.items()
        if traits.loses == choices.EXACT
    }
    numbers = {name: number for name, number in numbers.items() if number}
    tasks = _tasks(workers, ps, chief)
    if not numbers:
        raise ValueError(f"no exact entry of the catalogue trains on such tasks. Received: {tasks}")
    if len(numbers) == 1:
        return Chosen(next(iter(numbers)), f"the only exact entry for {tasks}")
    if facts is None:
        raise NoPlanError(
            f"several exact entries train on such tasks ({', '.join(sorted(numbers))}), and "
            f"nothing is known of the model. Received: {tasks}, and no plan"
        )
    found = [
        choices.predict(
            name,
            entries[name],
            facts.shared_by(number),
            dataclasses.replace(link, workers=number, ps=ps),
        )
        for name, number in numbers.items()
    ]
    best = choices.best_of(found, link)
    others = sorted((c for c in found if c is not best), key=lambda choice: choice.prediction.ms)
    listed = ", ".join(f"{other.entry} {other.prediction.ms:.4g}" for other in others)
    reason = (
        f"the best exact entry for {tasks}: {best.prediction.ms:.4g} ms predicted for a step of "
        f"{facts.batch_rows} rows ({listed})"
    )
    if not link.fits(best.prediction):
        reason += f"; {best.prediction.memory / 1e6:.4g} MB on a worker are more than it has"
    if best.speedup < 1:
        alone_ms = best.prediction.ms * best.speedup
        reason += f"; one process alone would be faster, with {alone_ms:.4g} ms"
    return Chosen(best.entry, reason)


def _trainers(path: str, workers: int, ps: int, chief: bool) -> int:
    """Number of tasks that train that way in a cluster; 0 if it cannot."""
    # A plan knows little of the layers, on which the bytes of tensor parallelism depend.
    if path in ("alone", "tensor_parallel"):
        return 0
    if path == "all_reduce":
        return 0 if ps else workers + chief
    if path == "parameter_server":
        return workers if ps and chief else 0
    return workers + chief if ps else 0


def _tasks(workers: int, ps: int, chief: bool) -> str:
    counts = {"chief": int(chief), "worker(s)": workers, "ps": ps}
    return " + ".join(f"{count} {job}" for job, count in counts.items() if count) or "no tasks"
