"""Tables on parameter servers, and everything else all-reduced: `HybridStrategy`."""

from keras_psplus.hybrid.strategy import HybridStrategy

__all__ = ["HybridStrategy"]
