"""Model and data of `benchmarks/pipeline.py`."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
    """A perceptron.

    Attributes:
        widths: Of the input, the hidden layers and the output.
        rows: Of a batch.
    """

    widths: tuple
    rows: int

    def batch(self):
        """Inputs and labels of a batch."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.rows, self.widths[0]), np.float32)
        return x, rng.integers(0, self.widths[-1], self.rows)


WORKS = {
    # About 300 ms of one core.
    "deep": Work((512,) * 25 + (10,), 2048),
    # As in `lab.work`, for two workers.
    "dense": Work((784, 1600, 1600, 700, 10), 128),
}
