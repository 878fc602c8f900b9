"""Compressors that send factors of matrices."""
