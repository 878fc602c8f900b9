"""Backups from which `fit` resumes at the very batch."""
