"""What all strategies' engines share: one replica's step, batches, data, backups, lost workers."""
