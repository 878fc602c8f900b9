"""Closures on workers: their queue, their recovery and the failures of tasks."""
