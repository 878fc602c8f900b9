"""Tables for any key: admission of keys, and expiry of rows.

policies  cache          the arguments `admit`, `expire` and `cache`
keys  initial_rows       fingerprints of keys, and rows that are functions of them
rows                     keys to row numbers, rows that are never copied, optimizers on them
rounding                 rows and slots in 16 bits
expiry  admission        the policies on tensors
snapshot  changes        contents as arrays, and what of them has changed
store                    all that a table holds
row_variable  local      the table as a variable, and in the memory of one process
imports                  rows of TFRA, NumPy's and Parquet files
versions  reader         what a training job publishes, and other processes read
"""

from keras_psplus.tables.imports import import_npy, import_parquet, import_tfra
from keras_psplus.tables.policies import Bloom, Cache, Capacity, Count, Norm, Probability, Unused

__all__ = [
    "Bloom",
    "Cache",
    "Capacity",
    "Count",
    "Norm",
    "Probability",
    "Unused",
    "import_npy",
    "import_parquet",
    "import_tfra",
]
