"""Peers that are gone, stopped or slow."""
