"""Has pytest, and cases in clusters that stay up, run their functions as they were traced.

TensorFlow's Grappler optimises each graph before it runs for the first time. Where a model trains a
few steps, that is a tenth of what a case takes. `make test-rest` and `make test-all` keep it, by
`KERAS_PSPLUS_GRAPPLER=1`; and so do jobs of their own, examples and blocks of the manual.
"""

import os

import tensorflow as tf

_VARIABLE = "KERAS_PSPLUS_GRAPPLER"


def run_as_traced():
    """Leaves Grappler out of this process, and of what it has others do."""
    if os.environ.get(_VARIABLE) != "1":
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
