"""The two pieces of work that every method does: a dense model, and one with a large table."""

import dataclasses

import numpy as np

_EXPONENT = 1.1  # of Zipf's law, which ids follow
_BATCHES = 16  # They are repeated.


@dataclasses.dataclass(frozen=True)
class Dense:
    """A perceptron without anything sparse.

    Attributes:
        widths: Of the input, the hidden layers and the output.
        batch_size: Examples of one worker in a step.
    """

    widths: tuple
    batch_size: int
    learning_rate = 0.01

    def dense_shapes(self):
        """Shapes of the variables with dense gradients."""
        return _layers(self.widths)

    def batches(self, workers):
        """Inputs and labels: some batches, each of all workers together."""
        rng = np.random.default_rng(0)
        shape = (_BATCHES // 2, self.batch_size * workers)
        x = rng.standard_normal((*shape, self.widths[0]), np.float32)
        return x, rng.integers(0, self.widths[-1], shape)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """A table of which an example sums up some rows, below a small perceptron.

    Attributes:
        rows: Rows of the table.
        dim: Numbers in a row.
        ids: Rows that an example looks up.
        widths: Of the perceptron's hidden layers and its output.
        batch_size: Examples of one worker in a step.
    """

    rows: int
    dim: int
    ids: int
    widths: tuple
    batch_size: int
    learning_rate = 0.05

    def dense_shapes(self):
        """Shapes of the variables with dense gradients."""
        return _layers((self.dim, *self.widths))

    def batches(self, workers):
        """Ids and labels: some batches, each of all workers together.

        Frequent ids lie anywhere in the table, as after hashing.
        """
        rng = np.random.default_rng(0)
        weight = 1 / np.arange(1, self.rows + 1) ** _EXPONENT
        shape = (_BATCHES, self.batch_size * workers, self.ids)
        ids = rng.permutation(self.rows)[rng.choice(self.rows, shape, p=weight / weight.sum())]
        return ids.astype(np.int64), rng.integers(0, self.widths[-1], shape[:2])

    def rows_of(self, batches):
        """Distinct rows in so many batches of one worker, on average."""
        ids, _ = self.batches(1)
        starts = range(0, _BATCHES, min(batches, _BATCHES))
        return float(np.mean([np.unique(ids[i : i + batches]).size for i in starts]))


SIZES = {
    # 4.95 million parameters; a table of 25.6 MB.
    "full": {
        "dense": Dense((784, 1600, 1600, 700, 10), 64),
        "sparse": Sparse(200_000, 32, 26, (64, 1000), 256),
    },
    # 291,000 parameters, enough to tell bytes of gradients from those of messages.
    "small": {
        "dense": Dense((256, 512, 300, 10), 32),
        "sparse": Sparse(20_000, 16, 8, (32, 10), 64),
    },
    "tiny": {
        "dense": Dense((32, 64, 10), 16),
        "sparse": Sparse(2_000, 8, 4, (16, 10), 16),
    },
}


def _layers(widths):
    return [shape for pair in zip(widths, widths[1:]) for shape in (pair, pair[1:])]
