"""The console and log files of tasks."""
