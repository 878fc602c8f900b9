"""Faults on purpose: what `keras-psplus run --chaos` does to a local cluster, and when."""
