"""Calls of layers and losses on tensors of which each worker has a part."""
