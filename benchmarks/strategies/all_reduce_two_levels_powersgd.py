"""Synchronous data parallelism, sums inside racks whole, between them as low-rank matrices."""

import json
import os

import keras_psplus


def strategy():
    """The racks are those of the lab."""
    racks = json.loads(os.environ["LAB_RACKS"])
    groups = [[i for i, rack in enumerate(racks) if rack == one] for one in sorted(set(racks))]
    return keras_psplus.MultiWorkerMirroredStrategy(topology=groups, compression="powersgd:4")
