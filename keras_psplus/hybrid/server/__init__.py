"""The process that serves shards of tables."""
