"""Hooks into Keras, TensorFlow and Python: all replaced functions, and the methods that they call.

`HOOKS` is the list of all replaced functions, of which each module has those of some parts of
Keras, `variables` also those of TensorFlow and Python. `keras-psplus doctor --hooks` prints it.
"""

from keras_psplus.keras_hooks import training, variables
from keras_psplus.keras_hooks import variables as keras_rs

HOOKS = (
    *training.TRAINER,
    *training.DATA,
    *variables.VARIABLES,
    *training.LAYERS,
    *training.LOSSES,
    *training.OPTIMIZER,
    *training.CALLBACKS,
    *variables.SAVING,
    *variables.RUNTIME,
    *keras_rs.hooks(),
)


_installed = False


def check() -> None:
    """Checks that all functions are there."""
    for hook in HOOKS:
        hook.check_signature()


def install() -> None:
    """Installs all hooks, once."""
    global _installed
    if _installed:
        return
    check()
    keras_rs.warn_of_misfit()
    for hook in HOOKS:
        hook.install()
    _installed = True
