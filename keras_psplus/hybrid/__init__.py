"""`HybridStrategy`: embedding tables on parameter servers, everything else all-reduced."""

from keras_psplus.hybrid.calls import TableServerError
from keras_psplus.hybrid.strategy import HybridStrategy
from keras_psplus.hybrid.table_files import TableFiles

__all__ = ["HybridStrategy", "TableFiles", "TableServerError"]
