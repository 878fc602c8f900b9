"""What several jobs under all-reduce are made of."""

from keras_psplus.all_reduce.topology.group_topology import FLAT
from keras_psplus.all_reduce.topology.hops import compressors_per_hop
from tests.support.parts import Interrupt, Interrupted  # noqa: F401


def compress(strategy, compressor, bucket_bytes=3000, topology=FLAT):
    """Gives a strategy other compressors, as a process has one strategy, and counts anew."""
    extended = strategy.extended
    extended._hops = compressors_per_hop(compressor, topology)
    extended.bucket_bytes = bucket_bytes
    extended.set_topology(topology)
