"""Workers step alone; every 32 steps an outer optimizer steps along their mean way (DiLoCo)."""

import keras_psplus


def strategy(**options):
    """For slow links: what weights have changed by is sent as bytes, under 1/100 of all-reduce."""
    return keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.DiLoCo(32), compression="int8", **options
    )
