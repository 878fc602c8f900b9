"""Compressors of a topology's hops: one inside groups, one between them."""

from __future__ import annotations

from typing import Any, NamedTuple

from keras_psplus.all_reduce.reduction.compressors import compressor_of
from keras_psplus.all_reduce.topology.group_topology import AUTO, Topology
from keras_psplus.arguments import shown
from keras_psplus.compression import Compressor, methods

WITHIN, BETWEEN = "within", "between"


class Hops(NamedTuple):
    """Compressors of a topology's hops, with error feedback where they ask for it.

    Attributes:
        within: Of the hop inside groups, or None.
        between: Of the hop between groups, or None. Without groups, of the one way that there is.
    """

    within: Compressor | None
    between: Compressor | None

    def collapse_to_ring(self, topology: Topology | str) -> Hops:
        """Compressors for a single ring.

        They are those between groups, or inside if the topology is one group.
        """
        is_one = isinstance(topology, Topology) and len(topology.groups) == 1
        return Hops(None, self.within if is_one else self.between)


def compressors_per_hop(compression: Any, topology: Topology | str) -> Hops:
    """Makes the compressors of a strategy.

    Args:
        compression: What a user gives: one value for the hop between groups, or a dict with
            `"within"` and `"between"`.
        topology: What `group_topology.get` has returned.

    Raises:
        ValueError: If a compressor is unknown or does not fit its hop, or there is no such hop.
    """
    named = set(compression) & {WITHIN, BETWEEN} if isinstance(compression, dict) else set()
    if not named:
        hops = Hops(None, compressor_of(compression))
    elif len(named) < len(compression):
        raise ValueError(
            'a dict with "within" or "between" must have no other keys; patterns of variables\' '
            "paths belong into the dict of a hop, as in "
            '{"between": {"*kernel": "int8"}}. '
            f"Received: compression={shown(compression)}"
        )
    else:
        hops = Hops(*(compressor_of(compression.get(hop)) for hop in (WITHIN, BETWEEN)))
    if topology == AUTO:
        _check_within(hops.within, compression)
        return _check_factors(hops, compression)
    if not isinstance(topology, Topology):
        if named:
            raise ValueError(
                '"within" and "between" are the hops of a topology with groups; without one, give '
                "`compression` the compressor itself. "
                f"Received: compression={shown(compression)}, topology={shown(topology)}"
            )
        return hops
    for hop, compressor, is_there in (
        (WITHIN, hops.within, any(len(group) > 1 for group in topology.groups)),
        (BETWEEN, hops.between, len(topology.groups) > 1),
    ):
        if compressor is not None and not is_there:
            lacks = "more than one group" if hop == BETWEEN else "a group of several workers"
            raise ValueError(
                f'there is no hop "{hop}" in a topology without {lacks}. '
                f"Received: compression={shown(compression)}, topology={topology.groups}"
            )
    _check_within(hops.within, compression)
    return _check_factors(hops, compression)


def _check_within(compressor: Compressor | None, compression: Any) -> None:
    """Raises ValueError if a compressor inside groups cannot encode piece by piece."""
    if compressor is not None and not compressor.supports_reduce_scatter:
        raise ValueError(
            'inside groups gradients can be sent by "bf16", "fp16", "int8", "sign", or a '
            "compressor that `supports_reduce_scatter`: each replica sums one piece. "
            f"Received: compression={shown(compression)}"
        )


def _check_factors(hops: Hops, compression: Any) -> Hops:
    if any(compressor.gathers_factors for compressor in methods.each(hops.between)):
        raise ValueError(
            '"factors" of gradients are gathered by all workers along one ring, and cannot cross a '
            "hop of a topology: leave `topology` out, or give another `compression`. "
            f"Received: compression={shown(compression)}"
        )
    return hops
