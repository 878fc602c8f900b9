"""Latency and bandwidth between workers, measured by TensorFlow's collectives."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.planning import links_file
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended

# What both of a pair send each other to find how long a message takes, and how long its bytes do.
_SHORT, _LONG = 1, 1 << 16
_ROUNDS, _BATCH = 3, 2


class MeasuredLink(NamedTuple):
    """One pair of workers.

    Attributes:
        latency: Seconds that a short message takes.
        transfer: Seconds that a long one takes, both ways at once.
    """

    latency: float
    transfer: float

    @property
    def bandwidth(self) -> float:
        """Bits per second, each way, beside other pairs that are measured at the same time."""
        return 32.0 * _LONG / max(self.transfer - self.latency, 1e-9)


Links = dict[tuple[int, int], MeasuredLink]


def rounds_of_pairs(number: int) -> list[list[tuple[int, int]]]:
    """Each pair of so many once, in rounds in which nobody is in two pairs."""
    # The worker that is paired with a number which is not there waits.
    places = list(range(number + number % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]))
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < number])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure(extended: MultiWorkerMirroredExtended) -> Links:
    """Measures each pair of workers; to be called on all of them.

    Args:
        extended: The strategy's. The first replica of each worker sends and receives.

    Returns:
        Dict from pairs of workers' numbers to `MeasuredLink`, the same on all workers.
    """
    workers, mine = extended._num_workers, extended._id_in_cluster
    local = len(extended.worker_devices)
    first_key = extended.take_group_keys(workers * workers)
    own = {}
    for pairs in rounds_of_pairs(workers):
        for pair in pairs:
            if mine in pair:
                launcher = extended.launcher(0).like(
                    first_key + pair[0] * workers + pair[1],
                    [worker * local for worker in pair],
                )
                own[pair] = [_seconds(launcher, size) for size in (_SHORT, _LONG)]
    assert extended.control is not None
    text = json.dumps([[*pair, *seconds] for pair, seconds in own.items()])
    slowest: Links = {}
    for one in extended.control.exchange("links", text):
        for first, second, *seconds in json.loads(one):
            # Of what both have measured, the longer.
            before = slowest.get((first, second), MeasuredLink(0.0, 0.0))
            slowest[first, second] = MeasuredLink(*map(max, zip(before, seconds)))
    return dict(sorted(slowest.items()))


def _seconds(launcher: Launcher, size: int) -> float:
    """Least seconds of one exchange, after a first call that connects the workers."""

    @tf.function(autograph=False)
    def exchange() -> tf.Tensor:
        with ops.device(launcher._device):
            found = tf.zeros([2, size])
            for _ in range(_BATCH):
                found = launcher.all_to_all(found)
            return tf.reduce_sum(found)

    exchange().numpy()
    found = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        exchange().numpy()
        found.append(time.perf_counter() - begin)
    return min(found) / _BATCH


def as_file(links: Links, names: Sequence[str]) -> links_file.Links:
    """The links in the form of the file that `keras-psplus doctor --links --json` writes."""
    return links_file.Links(
        names,
        {pair: links_file.Link(1e3 * link.latency, link.bandwidth) for pair, link in links.items()},
    )


def table(links: Links, names: Sequence[str]) -> str:
    """The links as a table: milliseconds of a short message, megabits per second."""
    rows = [("", *names[1:])]
    for i, name in enumerate(names[:-1]):
        cells = [""] * i
        for j in range(i + 1, len(names)):
            link = links[i, j]
            cells.append(f"{1e3 * link.latency:.1f} ms {1e-6 * link.bandwidth:,.0f} Mbit/s")
        rows.append((name, *cells))
    return text_table.aligned(rows)
