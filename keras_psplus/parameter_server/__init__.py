"""Asynchronous training: variables on parameter servers, steps sent to workers by the chief."""

from keras_psplus.parameter_server.strategy import ParameterServerStrategy

__all__ = ["ParameterServerStrategy"]
