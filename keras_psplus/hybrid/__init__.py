"""`HybridStrategy`: embedding tables on parameter servers, everything else all-reduced."""

from keras_psplus.errors import TableServerError
from keras_psplus.files.table_files import TableFiles
from keras_psplus.hybrid.strategy import HybridStrategy

__all__ = ["HybridStrategy", "TableFiles", "TableServerError"]
