"""Partition of a model into stages, by costs that are counted or measured."""
