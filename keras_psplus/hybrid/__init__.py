"""`HybridStrategy`: embedding tables on parameter servers, everything else all-reduced."""

from keras_psplus.errors import TableServerError
from keras_psplus.files.tables import TableFiles
from keras_psplus.hybrid.strategy import HybridStrategy

__all__ = ["HybridStrategy", "TableFiles", "TableServerError"]
