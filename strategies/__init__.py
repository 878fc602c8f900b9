"""The catalogue: one short file for each way of training, each defining `strategy()`."""
