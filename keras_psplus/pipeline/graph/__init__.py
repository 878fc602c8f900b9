"""The model's graph: boundaries of stages, devices, recomputation."""
