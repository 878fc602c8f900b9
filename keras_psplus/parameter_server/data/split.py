"""The workers' shares of a global batch."""

from typing import Any

from keras_psplus.core.batch import batches


def split(batch: Any, num_workers: int) -> list[tuple[float, Any]]:
    """Cuts a global batch into the workers' shares.

    Args:
        batch: Structure of tensors.
        num_workers: Number of workers.

    Returns:
        List of pairs of a share's part of the batch's rows and its batch; shares without rows are
        missing, unless none has any.
    """
    world = batches.World(rank=0, local_replicas=num_workers, replicas=num_workers)
    parts = batches.split(batch, world).replicas
    shares = [
        (int(part.local_rows) / int(part.global_rows), part.data)
        for part in parts
        if int(part.local_rows)
    ]
    return shares or [(1.0, batch)]
