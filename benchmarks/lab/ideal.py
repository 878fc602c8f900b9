"""The fewest bytes of a method's steps on each link, by the library's arithmetic."""

import functools

from keras_psplus.planning import step_bytes
from keras_psplus.planning.step_bytes import Table, Variable, Work

_COUNTED = (1, 2, 4, 8, 16)


@functools.cache
def work_of(work):
    """Gradients of one worker for one of `work.SIZES`, a `step_bytes.Work`."""
    rows = getattr(work, "kernel_rows", work.batch_size)
    variables = [
        Variable(shape, rows if len(shape) == 2 else None) for shape in work.dense_shapes()
    ]
    if not hasattr(work, "rows_of"):
        return Work(variables)
    touched = {batches: work.rows_of(batches) for batches in _COUNTED}
    return Work(variables, [Table(work.rows, work.dim, touched)])


def links(traits, work, workers, ps):
    """Bytes of one step of all workers, as of `step_bytes.links`.

    Args:
        traits: `keras_psplus.planning.step_bytes.Traits`.
        work: One of `work.SIZES`.
        workers: Number of workers.
        ps: Number of parameter servers, which share evenly.
    """
    return step_bytes.links(traits, work_of(work), workers, ps)


def busiest(traits, work, workers, ps):
    """Bytes of one step in the direction of a link that has most of them."""
    return step_bytes.busiest(traits, work_of(work), workers, ps)
