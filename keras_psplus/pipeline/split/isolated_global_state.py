"""Calls of layers that leave no trace in the script that they are made beside."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from keras_psplus.keras_internals.keras_parts import global_state

_SEED_GENERATOR, _NAMES = "global_seed_generator", "object_name_uids"


@contextlib.contextmanager
def isolated_global_state() -> Iterator[None]:
    """Context after which seeds and the counters of names are what they were.

    A layer may make layers, or draw numbers of a generator that is made then, in its `call`. What
    the script makes after this has the names and first values that it has without.
    """
    generator = global_state.get_global_attribute(_SEED_GENERATOR)
    names = global_state.get_global_attribute(_NAMES)
    had = None if names is None else dict(names)
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        global_state.set_global_attribute(_SEED_GENERATOR, generator)
        names = global_state.get_global_attribute(_NAMES)
        if names is not None:
            names.clear()
            names.update(had or {})
