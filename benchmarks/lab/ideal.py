"""The fewest bytes of a method's steps on each link, by the library's arithmetic."""

import functools

from keras_psplus import planning
from keras_psplus.planning import Table, Variable, Work

_COUNTED = (1, 2, 4, 8, 16)


@functools.cache
def work_of(work):
    """Gradients of one worker for one of `work.SIZES`, a `planning.Work`."""
    rows = getattr(work, "kernel_rows", work.batch_size)
    variables = [
        Variable(shape, rows if len(shape) == 2 else None) for shape in work.dense_shapes()
    ]
    if not hasattr(work, "rows_of"):
        return Work(variables)
    touched = {batches: work.rows_of(batches) for batches in _COUNTED}
    return Work(variables, [Table(work.rows, work.dim, touched)])


def links(traits, work, workers, ps):
    """Bytes of one step of all workers, as of `planning.links`.

    Args:
        traits: `keras_psplus.planning.Traits`.
        work: One of `work.SIZES`.
        workers: Number of workers.
        ps: Number of parameter servers, which share evenly.
    """
    return planning.links(traits, work_of(work), workers, ps)


def busiest(traits, work, workers, ps):
    """Bytes of one step in the direction of a link that has most of them."""
    return planning.busiest(traits, work_of(work), workers, ps)
