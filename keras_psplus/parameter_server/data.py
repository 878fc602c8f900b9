"""Data that the workers read themselves: each its share, into its own memory.

Every worker has an iterator over a share of the dataset, made there from the dataset's graph. The
chief asks for the next batches of every share a little ahead of the steps, so that it knows when
the data end; the batches stay where they are. A share whose worker is lost, or not there yet, is
read on by another one, from where its steps had got to, until its own is there.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf

from keras_psplus.datasets import serialize
from keras_psplus.log import logger
from keras_psplus.parameter_server import worker_function
from keras_psplus.parameter_server.worker_function import (
    Batches,
    JoinedBatches,
    is_of_worker,
    on_worker,
    to_chief,
)
from keras_psplus.tf_internals import data_distribute as distribute
from keras_psplus.tf_internals import data_structure as structure
from keras_psplus.tf_internals import dataset_ops

# Batches that are ready on workers, and who trains on them.


# Between two looks for batches, and for a worker that is free.
RETRY_SECONDS = 0.5
_FREE_SECONDS = 0.002


class Ticket:
    """Batches of a share, in the memory of `home`, read in `seconds`, for `worker`."""

    def __init__(
        self,
        home: int,
        share: int,
        batches: Batches,
        read_again: Callable[[int, int], Batches],
        seconds: float,
    ) -> None:
        self.home, self.share, self.batches, self.seconds = home, share, batches, seconds
        self.worker = home
        self._read_again = read_again
        self._is_used = False

    def payload_on(self, worker: int) -> Any:
        """A step's argument for a worker; batches are read again if they were lost."""
        if not self._is_used:
            self._is_used = True
            payload = _payload(self.batches)
            if worker == self.home:
                return payload
            try:
                return tf.nest.map_structure(to_chief, payload, expand_composites=True)
            except tf.errors.OpError as error:
                if not is_of_worker(error):
                    raise
        return _payload(self._read_again(worker, len(self.batches)))


def _payload(batches: Batches) -> Any:
    return batches.payload if isinstance(batches, JoinedBatches) else batches


class TicketQueue:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False
        self.error: BaseException | None = None

    def close(self) -> None:
        """Ends the readers, when nobody takes batches any more."""
        self.is_closed = True
        if self.changed.acquire(blocking=False):
            self.changed.notify_all()
            self.changed.release()

    def take(
        self,
        readers: Sequence[Any],
        free: Callable[[], list[int]],
        while_waiting: Callable[[], None],
    ) -> Ticket | None:
        while True:
            with self.changed:
                # A worker reads the shares of those that are not there, too: the fullest first.
                filled = sorted(readers, key=lambda reader: len(reader.tickets))
                ready = {r.tickets[0].home: r for r in filled if r.tickets}
                workers = free() if ready else []
                if workers:
                    # Else a slower worker has read more than it trains on.
                    worker = next((w for w in workers if w in ready), workers[0])
                    most = max(ready.values(), key=lambda reader: len(reader.tickets))
                    ticket = ready.get(worker, most).tickets.pop(0)
                    ticket.worker = worker
                    self.changed.notify_all()
                    return ticket
                if self.error is not None:
                    raise self.error
                if not ready and all(reader.is_done for reader in readers):
                    return None
                # Nothing here says that a worker has become free.
                self.changed.wait(_FREE_SECONDS if ready else RETRY_SECONDS)
            while_waiting()


# Reads of a dataset's next batches on a worker, several in one message.
#
# Batches stay on the worker. Each operation there costs the chief half a millisecond of processor
# time, so that ten batches read one by one cost more than the ten steps on them. Batches that
# cannot be joined are read one by one.


class WorkerReads:
    def __init__(self, element_spec: Any, joins: bool) -> None:
        self._spec = element_spec
        self._types = structure.get_flat_tensor_types(element_spec)
        self._shapes = structure.get_flat_tensor_shapes(element_spec)
        self._joins = joins and fit_end_to_end(element_spec)
        # The function and what it is traced from, which TensorFlow holds weakly.
        self._functions: dict[int, tuple[Any, Any]] = {}

    def take(self, iterator: tf.data.Iterator, worker: int, count: int) -> Batches:
        """Takes batches into a worker's memory; fewer at the end of the data."""
        if count == 1 or not self._joins:
            return self._take_one_by_one(iterator, worker, count)
        if count not in self._functions:
            self._functions[count] = self._trace(count)
        with on_worker(worker):
            *whole, rows = self._functions[count][0](iterator._iterator_resource)
        # The shape comes with the worker's answer; a value would have to be asked for.
        if not rows.shape[1]:
            return []
        return JoinedBatches(tf.nest.pack_sequence_as(self._spec, whole), rows)

    def _take_one_by_one(self, iterator: tf.data.Iterator, worker: int, count: int) -> list[Any]:
        batches = []
        with on_worker(worker):
            for _ in range(count):
                try:
                    # Python's `next` would leave the end of the data behind in an executor of its
                    # own.
                    flat = tf.raw_ops.IteratorGetNext(
                        iterator=iterator._iterator_resource,
                        output_types=self._types,
                        output_shapes=self._shapes,
                    )
                except tf.errors.OutOfRangeError:
                    break
                batches.append(structure.from_compatible_tensor_list(self._spec, flat))
        return batches

    def _trace(self, count: int) -> tuple[Any, Any]:
        def take(iterator: tf.Tensor) -> tuple[tf.Tensor, ...]:
            taken = [self._next_or_nothing(iterator) for _ in range(count)]
            whole = [tf.concat(parts, 0) for parts in zip(*(leaves for leaves, _ in taken))]
            rows = tf.transpose(
                [[tf.shape(leaf, tf.int64)[0] for leaf in leaves] for leaves, _ in taken]
            )
            # At the end of the data what is missing comes last.
            found = tf.reduce_sum([tf.cast(is_there, tf.int32) for _, is_there in taken])
            return *whole, rows[:, :found]

        function = tf.function(take, autograph=False)
        return function.get_concrete_function(tf.TensorSpec([], tf.resource)), function

    def _next_or_nothing(self, iterator: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        types, shapes = self._types, self._shapes
        optional = tf.raw_ops.IteratorGetNextAsOptional(
            iterator=iterator, output_types=types, output_shapes=shapes
        )
        is_there = tf.raw_ops.OptionalHasValue(optional=optional)
        leaves = tf.cond(
            is_there,
            lambda: tf.raw_ops.OptionalGetValue(
                optional=optional, output_types=types, output_shapes=shapes
            ),
            functools.partial(_no_rows, types, shapes),
        )
        return leaves, is_there


def fit_end_to_end(element_spec: Any) -> bool:
    """Whether all batches of a type specification can be joined: what is not dense cannot."""
    specs = tf.nest.flatten(element_spec)
    return bool(specs) and all(type(s) is tf.TensorSpec and _has_rows(s.shape) for s in specs)


def _has_rows(shape: tf.TensorShape) -> bool:
    return bool(shape.rank) and shape[1:].is_fully_defined()


def _no_rows(types: Iterable[tf.DType], shapes: Iterable[tf.TensorShape]) -> list[tf.Tensor]:
    return [tf.zeros([0, *shape[1:]], dtype) for dtype, shape in zip(types, shapes)]


# Function of a worker and a position that opens a share there, for a reader of some batches.
OpenShare: TypeAlias = Callable[[int, int], Callable[[int], Batches]]
_READ_AHEAD = 2
# Ready for a worker's next steps: while a step is asked for its result, its worker answers nothing.
_TICKETS_AHEAD = 4


class WorkerDataset:
    """A dataset that is read on the workers; iterating over it makes a `WorkerIterator`.

    `datasets` has, for each worker, a `tf.data.Dataset` and the seed of its unseeded shuffles. By
    `policy`, FILE or DATA, each reads its share of one; if it is None, its own to its end. `lost`
    are the workers that are not there, as they change.
    """

    def __init__(
        self,
        datasets: Sequence[tuple[tf.data.Dataset, int]],
        policy: tf.data.experimental.AutoShardPolicy | None,
        element_spec: Any,
        lost: Collection[int],
    ) -> None:
        self._datasets, self._policy, self._lost = datasets, policy, lost
        self._num_workers, self.element_spec = len(datasets), element_spec
        self._epoch = 0
        # Batches that were taken from each share, in the present pass.
        self._taken = [0] * self._num_workers
        self._begins_at: list[int] | None = None
        # Now and here: asked for while a share is opened, they would be asked of the worker.
        self._options = datasets[0][0].options()
        self._reads: list[tuple[Any, WorkerReads]] = []
        # Now, so that a dataset which cannot be sent is found before anything is read.
        self._first_graphs: list[tuple[tf.Tensor, Any]] | None = self._graphs()

    def _graphs(self) -> list[tuple[tf.Tensor, Any]]:
        distinct = {(id(dataset), seed): (dataset, seed) for dataset, seed in self._datasets}
        graphs = {
            key: (serialize(dataset, seed, self._epoch), dataset.element_spec)
            for key, (dataset, seed) in distinct.items()
        }
        return [graphs[id(dataset), seed] for dataset, seed in self._datasets]

    def __iter__(self) -> WorkerIterator:
        graphs, self._first_graphs = self._first_graphs, None
        if graphs is None:
            graphs = self._graphs()
        self._epoch += 1
        self._taken, self._begins_at = self._begins_at or [0] * self._num_workers, None
        return WorkerIterator(
            [self._share(*graph, index) for index, graph in enumerate(graphs)],
            self._num_workers,
            self.element_spec,
            self._taken,
            self._lost,
        )

    @property
    def seed(self) -> int:
        return self._datasets[0][1]

    @property
    def position(self) -> dict[str, Any]:
        return {"pass": self._epoch, "taken": list(self._taken)}

    def begin_at(self, position: dict[str, Any]) -> None:
        """Has the next pass be that of a `position`, scaled to other numbers of workers."""
        taken = position["taken"]
        if len(taken) != self._num_workers:
            taken = [sum(taken) // self._num_workers] * self._num_workers
        self._epoch, self._begins_at = max(0, position["pass"] - 1), list(taken)
        self._first_graphs = None

    def _share(self, graph: tf.Tensor, element_spec: Any, index: int) -> OpenShare:
        reads = self._reads_of(element_spec)

        def open_at(worker: int, position: int) -> Callable[[int], Batches]:
            with on_worker(worker):
                variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
                share = self._cut(dataset_ops._VariantDataset(variant, element_spec), index)
                iterator = iter(share.skip(position).prefetch(_READ_AHEAD))
            return functools.partial(reads.take, iterator, worker)

        return open_at

    def _reads_of(self, element_spec: Any) -> WorkerReads:
        """Readers of an element type, cached with their traced functions."""
        for spec, reads in self._reads:
            if spec == element_spec:
                return reads
        joins = fit_end_to_end(self.element_spec)
        self._reads.append((element_spec, WorkerReads(element_spec, joins)))
        return self._reads[-1][1]

    def _cut(self, dataset: tf.data.Dataset, index: int) -> tf.data.Dataset:
        if self._policy is None:
            return dataset
        if self._policy == tf.data.experimental.AutoShardPolicy.FILE:
            dataset = dataset.with_options(self._options)
            return distribute._AutoShardDataset(dataset, self._num_workers, index)
        return dataset.shard(self._num_workers, index)


class WorkerIterator:
    """One pass over a dataset that the workers read.

    `shares` are functions `(worker, position)` that open a share; `taken` counts each one's
    batches.
    """

    def __init__(
        self,
        shares: Sequence[OpenShare],
        num_workers: int,
        element_spec: Any,
        taken: list[int],
        lost: Collection[int],
    ) -> None:
        self.element_spec, self._taken = element_spec, taken
        self._queue = TicketQueue()
        self._readers = [
            _ShareReader(self._queue, share, number, num_workers, taken[number], lost)
            for number, share in enumerate(shares)
        ]
        self._is_started = False
        weakref.finalize(self, self._queue.close)

    def __next__(self) -> NoReturn:
        raise NotImplementedError("The batches are the workers': `take` says where they are.")

    def take(
        self, count: int, free: Callable[[], list[int]], while_waiting: Callable[[], None]
    ) -> Ticket | None:
        """Takes the next batches for a free worker; None at the end of the data.

        `free` returns the workers that may be given a step, the next one first. `while_waiting` is
        called while no batches come, and may raise.
        """
        if not self._is_started:
            self._is_started = True
            for reader in self._readers:
                reader.start(count)
        ticket = self._queue.take(self._readers, free, while_waiting)
        if ticket is not None:
            self._taken[ticket.share] += len(ticket.batches)
        return ticket


class _ShareReader:
    """Reads one share ahead, on one worker after another if need be."""

    def __init__(
        self,
        queue: TicketQueue,
        open_at: OpenShare,
        number: int,
        num_workers: int,
        position: int,
        lost: Collection[int],
    ) -> None:
        self._queue, self._open_at, self._number = queue, open_at, number
        self._home, self._num_workers, self._lost = number, num_workers, lost
        # Whether its own worker was seen not to be there, so that its return will be seen.
        self._was_lost = False
        self._take_next: Callable[[int], Batches] | None = None
        self._position = position
        self.tickets: list[Ticket] = []
        self.is_done = False

    def start(self, count: int) -> None:
        threading.Thread(target=self._run, args=(count,), daemon=True).start()

    def _run(self, count: int) -> None:
        while not self.is_done:
            with self._queue.changed:
                while len(self.tickets) >= _TICKETS_AHEAD and not self._queue.is_closed:
                    self._queue.changed.wait(RETRY_SECONDS)
            if self._queue.is_closed:
                return
            try:
                ticket = self._next(count)
            except Exception as error:
                if not is_of_worker(error):
                    self._give_up(self._translated(error))
                    return
                self._move()
                continue
            with self._queue.changed:
                self.tickets += [ticket] if len(ticket.batches) else []
                self.is_done = len(ticket.batches) < count
                self._queue.changed.notify_all()

    def _next(self, count: int) -> Ticket:
        self._choose_home()
        if self._take_next is None:
            self._take_next = self._open_at(self._home, self._position)
        began = time.monotonic()
        batches = self._take_next(count)
        seconds = time.monotonic() - began
        position, self._position = self._position, self._position + len(batches)

        def read_again(worker: int, n: int) -> Batches:
            return self._open_at(worker, position)(n)

        return Ticket(self._home, self._number, batches, read_again, seconds)

    def _choose_home(self) -> None:
        """Has its own worker read it if that is there, or else one that is."""
        before = self._home
        if self._number in self._lost:
            self._was_lost = True
        elif self._was_lost:
            self._was_lost, self._home = False, self._number
        if self._home in self._lost:
            self._home = self._following()
        if self._home != before:
            self._take_next = None

    def _following(self) -> int:
        others = ((self._home + 1 + i) % self._num_workers for i in range(self._num_workers))
        return next((worker for worker in others if worker not in self._lost), self._home)

    def _move(self) -> None:
        lost, self._home = self._home, self._following()
        self._take_next = None
        logger.warning(
            "worker-%d does not answer; worker-%d reads its share of the data on, from batch %d",
            lost,
            self._home,
            self._position,
        )
        with self._queue.changed:
            self._queue.changed.wait(RETRY_SECONDS)

    def _translated(self, error: BaseException) -> BaseException:
        if not worker_function.is_of_step(error):
            return error
        return worker_function.translate_error(
            error, f"worker-{self._home}", f"data, batch {self._position} of the worker's share"
        )

    def _give_up(self, error: BaseException) -> None:
        with self._queue.changed:
            self._queue.error = error
            self.is_done = True
            self._queue.changed.notify_all()
