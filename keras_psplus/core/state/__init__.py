"""State of workers from step to step: names, files, and values that wait."""
