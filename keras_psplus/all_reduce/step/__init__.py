"""A replica's step: its gradients, its function and its updates."""
