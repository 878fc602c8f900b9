"""Hosts in name only, where no network namespaces can be made."""

from keras_psplus.cluster.ports import free_ports
from tests.lab import netlab


class Loopback(netlab.Hosts):
    """Hosts in name only: all tasks share this machine's loopback, which has no limit.

    For those who may make no network namespaces. Its counters are those of all tasks together, and
    of whatever else uses the loopback.

    Args:
        hosts: Number of hosts.
    """

    interface = "lo"
    racks, uplinks = 1, ()
    counters = "/proc/net/dev"

    def __init__(self, hosts):
        super().__init__(hosts)
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(hosts)]

    def address(self, rank):
        """Address on which a host's task listens."""
        return self._addresses[rank]

    def device(self, rank):
        """Key of a host's byte counter in `counters`."""
        return "lo"

    def rack(self, rank):
        """The rack that a host is in: there is one."""
        return 0

    def set_rate(self, rate):
        """Changes nothing: there are no links."""
