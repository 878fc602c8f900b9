"""Plans for a script: links, costs, `--strategy auto`."""
