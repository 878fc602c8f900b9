"""Traits of an entry: messages and their receivers, which determine bytes and time."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

_PATHS = {
    "MultiWorkerMirroredStrategy": "all_reduce",
    "ParameterServerStrategy": "parameter_server",
    "HybridStrategy": "hybrid",
    "ModelParallelStrategy": "tensor_parallel",
    "get_strategy": "alone",
}
# What an entry may say of the model's compilation.
_TOGETHER = "STEPS_PER_EXECUTION"
_UPDATES = {"Accumulate": "accumulate", "LocalSGD": "local", "DiLoCo": "local"}


@dataclasses.dataclass(frozen=True)
class Traits:
    """Messages of an entry, and their receivers.

    Attributes:
        path: `"alone"`, `"all_reduce"`, `"parameter_server"`, `"hybrid"` or `"tensor_parallel"`.
        compression: Of dense gradients, as `keras_psplus.compression.get` names them; None for
            float32, `"nothing"` if they are not sent.
        rows: Of rows' gradients.
        pull: Of what is read of servers.
        updates: None for every step, `"accumulate"`, or `"local"` for steps without the others.
        every: Steps from one exchange to the next.
        waits: Whether the workers take each step together.
        together: Keras's `steps_per_execution`, for strategies whose workers wait for each other.
        needs_racks: Whether it is of use only where links differ.
        prefetch: Whether rows are read of servers while the step before computes.
        shard: As of `MultiWorkerMirroredStrategy`.
    """

    path: str = "all_reduce"
    compression: str | None = None
    rows: str | None = None
    pull: str | None = None
    updates: str | None = None
    every: int = 1
    waits: bool = True
    together: int = 1
    needs_racks: bool = False
    prefetch: bool = False
    shard: str | None = None

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers."""
        return self.path in ("parameter_server", "hybrid")

    @property
    def loses(self) -> str:
        """Differences from the training of one process; `"exact"` if there are none."""
        lossy = [c for c in (self.compression, self.rows, self.pull) if c not in (None, "factors")]
        words = []
        if not self.waits or self.prefetch:
            words.append("stale")
        if self.updates == "local":
            words.append("local steps")
        if self.updates == "accumulate":
            words.append(f"batch x{self.every}")
        if lossy:
            words.append("lossy")
        return ", ".join(words) or "exact"


def traits_of(source: str) -> Traits:
    """Reads off an entry's Python source how it trains, without running it.

    Args:
        source: Text of a file that defines `strategy()`.

    Returns:
        `Traits`. A strategy that is not known counts as one of workers alone.
    """
    tree = ast.parse(source)
    found: dict[str, Any] = {}
    for node in tree.body:
        # Others may set what has no name, such as a variable of the environment.
        names = [getattr(target, "id", None) for target in getattr(node, "targets", [])]
        if _TOGETHER in names and isinstance(node, ast.Assign):
            found["together"] = ast.literal_eval(node.value)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _name(call)
        if name in _PATHS:
            words = {
                k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)
            }
            found["path"] = path = _PATHS[name]
            found["compression"] = words.get("compression")
            found["needs_racks"] = any(k.arg == "topology" for k in call.keywords)
            if any(_name(k.value) == "NoCommunication" for k in call.keywords):
                found["compression"] = "nothing"
            found["rows"] = words.get("row_compression" if path == "hybrid" else "compression")
            found["pull"] = words.get("pull_compression")
            found["waits"] = path != "parameter_server" or words.get("mode") == "sync"
            found["prefetch"] = words.get("prefetch") is True
            found["shard"] = words.get("shard")
        elif name in _UPDATES and call.args and isinstance(call.args[0], ast.Constant):
            found["updates"] = _UPDATES[name]
            found["every"] = call.args[0].value
    return Traits(**found)


def _name(node: ast.expr) -> str | None:
    """Name of the function in a call, without its module; None for other nodes."""
    function = getattr(node, "func", None)
    name: str | None = getattr(function, "attr", getattr(function, "id", None))
    return name
