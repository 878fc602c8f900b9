"""The process of a task: start, memory, forks, exit code."""
