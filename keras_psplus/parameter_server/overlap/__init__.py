"""Updates that overlap with the next step."""
