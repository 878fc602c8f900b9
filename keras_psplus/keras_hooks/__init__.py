"""Hooks into Keras: all replaced functions, and the engine methods that they call.

`HOOKS` is the list of all replaced functions. Each module has those of one part of Keras.
`keras-psplus doctor --hooks` prints it.
"""

from keras_psplus.keras_hooks import (
    callbacks,
    data,
    keras_rs,
    layers,
    losses,
    optimizer,
    process,
    saving,
    trainer,
    variables,
)

HOOKS = (
    *trainer.HOOKS,
    *data.HOOKS,
    *variables.HOOKS,
    *layers.HOOKS,
    *losses.HOOKS,
    *optimizer.HOOKS,
    *callbacks.HOOKS,
    *saving.HOOKS,
    *process.HOOKS,
    *keras_rs.hooks(),
)


_installed = False


def install() -> None:
    """Installs all hooks, once.

    Raises:
        ImportError: If this Keras has no function that is to be replaced, or one that takes other
            parameters. None is replaced then.
    """
    global _installed
    if _installed:
        return
    for hook in HOOKS:
        hook.check_signature()
    for hook in HOOKS:
        hook.install()
    _installed = True
