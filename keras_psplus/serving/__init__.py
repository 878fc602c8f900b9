"""Models and tables for processes that serve them.

export          a SavedModel that needs nothing of this library
TableReader     rows of a table while it is trained elsewhere
"""

from keras_psplus.serving.export import export
from keras_psplus.tables.versions import TableReader

__all__ = ["TableReader", "export"]
