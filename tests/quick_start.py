"""Imports TensorFlow and Keras for a job, and keeps Python's garbage collector out of them.

To be imported first. The collector otherwise walks through the millions of objects that these two
consist of, again and again while they are imported, and at each `clear_session()`: a quarter of
what the jobs that train many small models take.
"""

import gc
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
gc.disable()

import keras  # noqa: E402
import tensorflow  # noqa: E402, F401


class _NoCollector:
    """What Keras has for `gc`, as it forgets models: what they leave, the next collection takes."""

    @staticmethod
    def collect():
        return 0


_state = sys.modules[keras.utils.clear_session.__module__]
if not hasattr(_state, "gc"):
    raise ImportError(f"`clear_session` has no `gc` to replace. Received: {_state.__name__}")
_state.gc = _NoCollector
gc.freeze()
gc.set_threshold(50_000, 20, 20)
gc.enable()

from tests.support import measure  # noqa: E402

measure.count_traces()
