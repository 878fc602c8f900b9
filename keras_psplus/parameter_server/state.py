"""State of each worker from step to step, and each one's copies of tables."""

from __future__ import annotations

import contextlib
import itertools
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.worker_state import WaitingValues, WorkerState
from keras_psplus.log import logger
from keras_psplus.parameter_server.worker_function import is_of_worker, on_worker
from keras_psplus.tf_internals import control_flow_func_graphs as control_flow
from keras_psplus.tf_internals import (
    coordinator_context,
    load_context,
    nest,
    ps_values,
    resource_variable_ops,
)
from keras_psplus.tf_internals import framework_ops as ops

# State of each worker from step to step, for compressors and `updates`.
#
# A state is a resource of the worker that is found by its name, not by a handle: a step's function
# is the same for all workers, and each has a separate state. It is created when a step first needs
# it, so a worker that was restarted starts with an empty state.


_HANDLES = "keras_psplus_worker_state"


class WorkerStates(WorkerState):
    """Named states of all workers, accessed in steps, and by the chief between steps.

    Workers that are `absent`, as they change, need not come; `losses` counts how often all states
    have been forgotten.
    """

    kind = "worker"

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self._num_workers = num_workers
        # Of resources' names in this run of the job: a worker may serve one job after another.
        self.prefix = f"keras_psplus/{uuid.uuid4().hex}"
        self._owners = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, str]()
        # By name: the shape and dtype.
        self._leaves: dict[str, tuple[tf.TensorShape, tf.DType]] = {}
        self._unsaved: set[str] = set()
        # By owner and worker.
        self._waiting: dict[str, dict[int, WaitingValues]] = {}
        self._ownerless: list[str] = []
        self.absent: Collection[int] = ()
        self.losses = 0

    @property
    def has_any(self) -> bool:
        return not self._unsaved.issuperset(self._leaves)

    @property
    def units(self) -> Sequence[int]:
        return range(self._num_workers)

    @property
    def total(self) -> int:
        return self._num_workers

    @property
    def layout(self) -> str:
        return f"{self.total}-workers"

    def owner(self, owner: keras.optimizers.Optimizer) -> str:
        if owner not in self._owners:
            self._destroy_ownerless()
            # The object's own if possible, which the same script finds again when it resumes.
            names = (f"{owner.name}#{i}" if i else owner.name for i in itertools.count())
            name = next(name for name in names if name not in self._owners.values())
            self._owners[owner] = name
            # Later, as this may happen at any moment.
            weakref.finalize(owner, self._ownerless.append, name).atexit = False
        return self._owners[owner]

    def handle(self, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        """Handle of a state in the function being traced: one, for order's sake."""
        graph = ops.get_default_graph()
        while isinstance(graph, control_flow.ControlFlowFuncGraph):
            graph = graph.outer_graph
        known = graph.get_collection_ref(_HANDLES)
        if not known:
            known.append({})
        if name not in known[0]:
            with graph.as_default(), ops.control_dependencies(None), ops.device(None):
                known[0][name] = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    shape, dtype, f"{self.prefix}/{name}", "worker_state", True
                )
        return known[0][name]

    def register(
        self, forms: Mapping[str, tuple[tf.TensorShape, tf.DType]], are_saved: bool = True
    ) -> None:
        """Notes leaves, to be saved or not, and gives them values that wait for them."""
        new = {name: form for name, form in forms.items() if name not in self._leaves}
        self._leaves.update(forms)
        if not are_saved:
            self._unsaved.update(forms)
            return
        for owner, by_worker in self._waiting.items():
            own = _of_owner(owner, new)
            for worker, waiting in by_worker.items() if own else ():
                self._assign(worker, owner, waiting.take(own))

    def arrays(
        self, owner: keras.optimizers.Optimizer, unit: int
    ) -> Iterable[tuple[str, np.ndarray]] | None:
        owner_name, fetched = self.owner(owner), list[tuple[str, np.ndarray]]()
        if unit in self.absent:
            return fetched
        with self._reaching(unit) as lost:
            for name, (shape, dtype) in self._saved(owner_name).items():
                handle = self._eager_handle(f"{owner_name}/{name}", shape, dtype)
                if tf.raw_ops.VarIsInitializedOp(resource=handle).numpy():
                    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
                    fetched.append((name, value.numpy()))
        return None if lost else fetched

    def assign(
        self, owner: Any, values: Mapping[int, Mapping[str, np.ndarray]], is_strict: bool
    ) -> None:
        # A worker may have none, and begins again. Those of optimizers that are gone, now: the next
        # one may come to have such a name.
        owner = self.owner(owner)
        self._destroy_ownerless()
        forms = self._saved(owner)
        waiting = {worker: WaitingValues() for worker in values}
        found = {
            worker: waiting[worker].put(of_worker, forms, is_strict and bool(of_worker))
            for worker, of_worker in values.items()
        }
        self.destroy(f"{owner}/")
        self.losses += 1
        self._waiting[owner] = waiting
        for worker, fitting in found.items():
            self._assign(worker, owner, fitting)

    def _saved(self, owner: str) -> dict[str, tuple[tf.TensorShape, tf.DType]]:
        saved = {name: form for name, form in self._leaves.items() if name not in self._unsaved}
        return _of_owner(owner, saved)

    def _assign(self, worker: int, owner: str, values: Mapping[str, np.ndarray]) -> None:
        if worker in self.absent:
            return
        with self._reaching(worker) as lost:
            for name, value in values.items():
                name = f"{owner}/{name}"
                handle = self._eager_handle(name, *self._leaves[name])
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
        if lost:
            logger.warning("worker-%d cannot be reached; its gradients' state begins empty", worker)

    def destroy(self, of_owner: str = "") -> None:
        self.losses += not of_owner
        names = [name for name in self._leaves if name.startswith(of_owner)]
        for worker in self.units if names else ():
            with self._reaching(worker):
                for name in names:
                    handle = self._eager_handle(name, *self._leaves[name])
                    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    def end(self) -> None:
        """Lets the workers forget everything, as this process ends, if they can be reached."""
        with contextlib.suppress(Exception):
            self.destroy()

    def _destroy_ownerless(self) -> None:
        while self._ownerless:
            name = self._ownerless.pop()
            self._waiting.pop(name, None)
            owner = f"{name}/"
            self.destroy(owner)
            self._leaves = {n: form for n, form in self._leaves.items() if not n.startswith(owner)}

    @contextlib.contextmanager
    def _reaching(self, worker: int) -> Iterator[list[Exception]]:
        """Context on a worker; its list is not empty afterwards if that is lost."""
        lost: list[Exception] = []
        try:
            with ops.init_scope(), on_worker(worker, device=None):
                yield lost
        except tf.errors.OpError as error:
            if not is_of_worker(error):
                raise
            lost.append(error)

    def _eager_handle(self, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=f"{self.prefix}/{name}")


def _of_owner(owner: str, forms: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{owner}/"
    return {n.removeprefix(prefix): form for n, form in forms.items() if n.startswith(prefix)}


# Lookup tables of a script, of which each worker has a copy.


class WorkerTable(ps_values.DistributedTable):
    """A table whose copy a worker makes when it needs it, or `ClusterCoordinator`."""

    def __init__(self, strategy: tf.distribute.Strategy, make: Callable[[], Any]) -> None:
        self._strategy = strategy
        super().__init__(strategy, make)

    def _maybe_build_distributed_table(self) -> None:
        self._coordinator = self._strategy._cluster_coordinator
        if self._coordinator is not None:
            super()._maybe_build_distributed_table()

    def resource_handle_call_time_value(self) -> tuple[Callable[[], tf.Tensor], tf.TensorSpec]:
        """A function that a step's call finds the worker's table by, and its specification."""
        of_coordinator, spec = super().resource_handle_call_time_value()

        def handle() -> tf.Tensor:
            dispatch = coordinator_context.get_current_dispatch_context()
            find = getattr(dispatch and dispatch.worker, "resource", None)
            if find is None:
                return of_coordinator()
            return find(self, self._wrapped_creator).resource_handle

        return handle, spec


def creator_scope(strategy: tf.distribute.Strategy) -> AbstractContextManager[None]:
    """Context in which a script's static tables are those of all workers."""

    def create(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if load_context.in_load_context():
            # Functions of a SavedModel fill it, here only.
            return make(*args, **kwargs)
        return WorkerTable(strategy, lambda: make(*args, **kwargs))

    return ops.resource_creator_scope("StaticHashTable", create)


# Variables of each worker's own, and states of them, in functions that workers run.


class WorkerVariable:
    def __init__(self, handle: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> None:
        self.handle, self.shape, self.dtype = handle, shape, dtype

    def read_value(self) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        value.set_shape(self.shape)
        return value

    def assign(self, value: Any, read_value: bool = False) -> None:
        value = tf.convert_to_tensor(value, self.dtype)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def assign_add(self, value: Any, read_value: bool = False) -> None:
        value = tf.convert_to_tensor(value, self.dtype)
        tf.raw_ops.AssignAddVariableOp(resource=self.handle, value=value)


class WorkerVariables:
    """Makes variables that belong together: a worker that misses one begins again with all."""

    is_saved = True

    def __init__(self, states: WorkerStates, prefix: str) -> None:
        self._states, self._prefix = states, prefix
        self._made: dict[str, WorkerVariable] = {}

    def variable(
        self,
        name: str,
        shape: tf.TensorShape | Sequence[int | None],
        dtype: tf.DType | str,
        on_host: bool = False,
    ) -> WorkerVariable:
        """A variable of zeros, for after `begin`; an unknown number of rows is 0.

        A worker waits for servers in each step, so that it makes no difference to it if its GPU
        waits for the host: `on_host` is ignored.
        """
        name, form = f"{self._prefix}/{name}", (tf.TensorShape(shape), tf.as_dtype(dtype))
        handle = self._states.handle(name, *form)
        self._made[name] = WorkerVariable(handle, *form)
        return self._made[name]

    def begin(self, initialize: Callable[[], Any] | None = None) -> None:
        """Makes all of the variables, zeros or by `initialize`, if one is missing."""
        made = self._made.values()
        forms = {name: (variable.shape, variable.dtype) for name, variable in self._made.items()}
        self._states.register(forms, self.is_saved)

        are_there = [tf.raw_ops.VarIsInitializedOp(resource=variable.handle) for variable in made]
        # Not 0 for the graph, which would take that for the size of what is read: `no_rows_of`.
        none = tf.minimum(tf.cast(tf.reduce_all(tf.stack(are_there)), tf.int32), 0)

        def make() -> tf.Tensor:
            for variable in made if initialize is None else ():
                sizes = [none if size is None else size for size in variable.shape.as_list()]
                variable.assign(tf.zeros(sizes, variable.dtype))
            if initialize is not None:
                initialize()
            return tf.constant(True)

        tf.cond(tf.reduce_all(tf.stack(are_there)), lambda: tf.constant(True), make)


def read_state(
    states: WorkerStates, name: str, init: Callable[[], Any]
) -> tuple[Any, Callable[[Any], None]]:
    """A state of the present worker, `init` at first, and a function that writes it."""
    with tf.Graph().as_default():
        first = init()
        leaves = nest.flatten_with_joined_string_paths(first)
        forms = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves}
    structure = tf.nest.map_structure(lambda _: 0, first)
    if not forms:
        return structure, lambda state: None
    maker = WorkerVariables(states, name)
    variables = [maker.variable(path, *form) for path, form in forms.items()]

    def write(state: Any) -> None:
        tf.nest.assert_same_structure(structure, state)
        for variable, value in zip(variables, tf.nest.flatten(state)):
            variable.assign(value)

    maker.begin(lambda: write(init()))
    values = [variable.read_value() for variable in variables]
    return tf.nest.pack_sequence_as(structure, values), write
