"""Graphs of traced steps: stand-ins for gradients, metrics within them."""
