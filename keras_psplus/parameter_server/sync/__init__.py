"""Synchronous steps: all workers' gradients in one update."""
