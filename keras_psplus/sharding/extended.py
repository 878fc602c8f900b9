"""Implementation half of all-reduce with the optimizer's state in shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.sharding.store import ShareStore
from keras_psplus.sharding.variable import ShareVariable, TensorVariable


class ShardedExtended(MultiWorkerMirroredExtended):
    """Additional APIs of a strategy with `shard=`."""

    _store: ShareStore | None = None

    @property
    def store(self) -> ShareStore:
        """All variables in shares."""
        if self._store is None:
            assert self._control is not None
            self._store = ShareStore(
                self.launcher(0),
                self._host_cross_device_ops.launchers[0],
                self.take_group_keys(1),
                self._control,
                self.world.rank,
                self._container_strategy().progress,
            )
        return self._store

    def has_made(self, variable: Any) -> bool:
        return isinstance(variable, ShareVariable) or super().has_made(variable)

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[Any]:
        if isinstance(colocate_with_variable, ShareVariable):
            # Sums of `gradient_accumulation_steps` are mirrored.
            return contextlib.nullcontext()
        return super().colocate_vars_with(colocate_with_variable)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        if isinstance(var, (TensorVariable, ShareVariable)):
            return fn(var, *args, **(kwargs or {}))
        return super().update(var, fn, args, kwargs, group)

    def broadcast(self, variables: Sequence[Any]) -> None:
        # What is in shares has come to all workers when the chief has read it.
        super().broadcast([v for v in variables if not isinstance(v, ShareVariable)])
