"""Imports TensorFlow and Keras for a job, and keeps Python's garbage collector out of them.

To be imported first. The collector otherwise walks through the millions of objects that these two
consist of, again and again while they are imported, and at each `clear_session()`: a quarter of
what the jobs that train many small models take.
"""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
gc.disable()

import keras  # noqa: E402, F401
import tensorflow  # noqa: E402, F401

gc.freeze()
gc.set_threshold(50_000, 20, 20)
gc.enable()
