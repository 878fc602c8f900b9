"""Groups of hosts and racks, and the hops between them."""
