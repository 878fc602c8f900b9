"""Parts that know no other part: optimizers, checks, scalars."""
