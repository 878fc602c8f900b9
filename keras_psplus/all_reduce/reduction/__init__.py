"""Reduction of gradients: buckets, compressors, routes."""
