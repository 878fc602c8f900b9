"""Asynchronous parameter servers: gradients as bytes, variables read in bfloat16."""

import keras_psplus


def strategy(**options):
    """Gradients with error feedback on each worker; variables themselves stay float32."""
    return keras_psplus.ParameterServerStrategy(
        compression="int8", pull_compression="bf16", **options
    )
