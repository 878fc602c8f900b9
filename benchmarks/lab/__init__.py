"""Benchmark lab: emulated hosts, their work, and evaluation of the figures."""
