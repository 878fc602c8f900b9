"""Snapshots of a job: tables by the servers, all else by the chief."""
