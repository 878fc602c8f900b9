"""Models that every method trains: a dense one, and one with a large table.

A convolutional one and a transformer are there to test the plan on more than these two.
"""

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
        return _normal(self.batch_size * workers, self.widths[:1], self.widths[-1])


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


@dataclasses.dataclass(frozen=True)
class Convolutional:
    """Convolutions of 3 x 3 with pooling, below a small perceptron.

    Attributes:
        side: Of the square images, of one channel.
        filters: Of each convolution.
        widths: Of the perceptron's hidden layers and its output.
        batch_size: Examples of one worker in a step.
    """

    side: int
    filters: tuple
    widths: tuple
    batch_size: int
    learning_rate = 0.01

    def dense_shapes(self):
        """Shapes of the variables with dense gradients."""
        channels = (1, *self.filters)
        kernels = [(3, 3, *pair) for pair in zip(channels, channels[1:])]
        side = self.side // 2 ** len(self.filters)
        shapes = [shape for kernel in kernels for shape in (kernel, kernel[3:])]
        return shapes + _layers((side * side * channels[-1], *self.widths))

    def batches(self, workers):
        """Inputs and labels: some batches, each of all workers together."""
        return _normal(self.batch_size * workers, (self.side, self.side, 1), self.widths[-1])


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Blocks of attention over short texts, which are classified.

    Attributes:
        rows: Words that there are.
        dim: Of a word's vector.
        ids: Words of a text.
        heads: Of the attention.
        hidden: Width of the perceptron in a block.
        blocks: Number of blocks.
        classes: Number of classes.
        batch_size: Texts of one worker in a step.
    """

    rows: int
    dim: int
    ids: int
    heads: int
    hidden: int
    blocks: int
    classes: int
    batch_size: int
    learning_rate = 0.01

    @property
    def kernel_rows(self):
        """Rows of the matrices whose product is the gradient of a kernel in a block."""
        return self.batch_size * self.ids

    def dense_shapes(self):
        """Shapes of the variables with dense gradients."""
        size = self.dim // self.heads
        projection = [(self.dim, self.heads, size), (self.heads, size)]
        attention = [*3 * projection, (self.heads, size, self.dim), (self.dim,)]
        perceptron = _layers((self.dim, self.hidden, self.dim))
        norms = 4 * [(self.dim,)]
        return self.blocks * [*attention, *perceptron, *norms] + _layers((self.dim, self.classes))

    def batches(self, workers):
        """Ids and labels: some batches, each of all workers together."""
        rng = np.random.default_rng(0)
        shape = (_BATCHES, self.batch_size * workers)
        ids = rng.integers(0, self.rows, (*shape, self.ids))
        return ids, rng.integers(0, self.classes, shape)

    def rows_of(self, batches):
        """Distinct words in so many batches of one worker, on average."""
        return self.rows * (1 - (1 - 1 / self.rows) ** (batches * self.kernel_rows))


SIZES = {
    # 4.95 million parameters; a table of 25.6 MB.
    "full": {
        "dense": Dense((784, 1600, 1600, 700, 10), 64),
        "sparse": Sparse(200_000, 32, 26, (64, 1000), 256),
        # 0.69 and 0.65 million parameters.
        "convolutional": Convolutional(28, (32, 64, 128), (512, 10), 32),
        "transformer": Transformer(2_000, 128, 32, 4, 512, 2, 10, 16),
    },
    # 291,000 parameters, enough to tell bytes of gradients from those of messages.
    "small": {
        "dense": Dense((256, 512, 300, 10), 32),
        "sparse": Sparse(20_000, 16, 8, (32, 10), 64),
        "convolutional": Convolutional(16, (8, 16), (64, 10), 16),
        "transformer": Transformer(500, 32, 16, 2, 64, 1, 10, 8),
    },
    "tiny": {
        "dense": Dense((32, 64, 10), 16),
        "sparse": Sparse(2_000, 8, 4, (16, 10), 16),
        "convolutional": Convolutional(8, (4,), (8, 10), 8),
        "transformer": Transformer(50, 8, 4, 2, 16, 1, 10, 4),
    },
}


def _normal(rows, features, classes):
    """Batches of normal numbers, with labels."""
    rng = np.random.default_rng(0)
    shape = (_BATCHES // 2, rows)
    x = rng.standard_normal((*shape, *features), np.float32)
    return x, rng.integers(0, classes, shape)


def _layers(widths):
    return [shape for pair in zip(widths, widths[1:]) for shape in (pair, pair[1:])]
