"""Tables as workers see them: variables, placement, gradients of rows, prefetch."""
