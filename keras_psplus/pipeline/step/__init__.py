"""A pipeline's traced step, by schedule."""
