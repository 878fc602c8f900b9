"""Rows of tables: their wire format, initial values and updates."""
