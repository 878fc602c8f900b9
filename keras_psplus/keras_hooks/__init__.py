"""The one door into Keras: what it cannot do through `tf.distribute`, for our strategies only.

Each module replaces a handful of Keras's functions by ones that ask whether the strategy is one of
this library's with several replicas, and call Keras's own otherwise. `install` checks every
signature they rely on and names the Keras version and the symbol when one does not fit.
"""

from keras_psplus.keras_hooks import (
    backup,
    callbacks,
    epochs,
    hybrid,
    hybrid_prefetch,
    keras_rs,
    losses,
    optimizer,
    outside_models,
    parameter_server,
    parameter_server_optimizer,
    parameter_server_predict,
    parameter_server_sync,
    parameter_server_updates,
    parameter_server_variables,
    replica_context,
    row_reads,
    saving,
    snapshots,
    terminate_on_nan,
    trainer,
    updates,
    variables,
)

_installed = False


def install():
    """Installs all hooks, once."""
    global _installed
    if _installed:
        return
    for module in (
        variables,
        losses,
        replica_context,
        optimizer,
        trainer,
        outside_models,
        epochs,
        updates,
        callbacks,
        backup,
        saving,
        parameter_server,
        parameter_server_optimizer,
        parameter_server_predict,
        parameter_server_sync,
        parameter_server_updates,
        parameter_server_variables,
        hybrid,
        hybrid_prefetch,
        keras_rs,
        row_reads,
        snapshots,
        terminate_on_nan,
    ):
        module.install()
    _installed = True
