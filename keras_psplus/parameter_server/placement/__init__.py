"""Placement of variables on the servers: which server holds which rows."""
