"""Parameter servers and workers that serve until the job ends."""
