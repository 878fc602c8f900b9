"""A replica's share of a batch and of the losses."""
