"""Calls of the table servers: clients, tickets and access keys."""
