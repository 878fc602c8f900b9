"""Workers step alone, and their weights are averaged every eight steps (local SGD)."""

import keras_psplus


def strategy(**options):
    """An eighth of the bytes, and no waiting for others in between."""
    return keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.LocalSGD(8), **options
    )
