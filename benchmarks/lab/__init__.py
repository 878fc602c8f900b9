"""The benchmark lab: emulated hosts, the work they do, and what is made of the figures."""
