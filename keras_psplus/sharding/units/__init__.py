"""Units: what gathers weights for the layers of a step, and again for backward."""
