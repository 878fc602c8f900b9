"""Transfers between stages, and their compression."""
