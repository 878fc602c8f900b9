"""Engine parts that all strategies share.

One replica's step, batches, data, backups and lost workers.
"""
