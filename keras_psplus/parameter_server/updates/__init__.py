"""Update rules on workers: sums of several steps, local SGD."""
