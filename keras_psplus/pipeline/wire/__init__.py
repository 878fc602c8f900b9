"""Transfers between stages and pipelines, and their compression."""
