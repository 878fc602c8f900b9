"""Workers step alone; every 32 steps an outer optimizer steps along their mean way (DiLoCo)."""

import keras_psplus


def strategy(**options):
    """DiLoCo for slow links: sends int8 weight changes, under 1/100 of all-reduce's bytes."""
    return keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.DiLoCo(32), compression="int8", **options
    )
