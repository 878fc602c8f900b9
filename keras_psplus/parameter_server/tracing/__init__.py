"""Functions that workers trace: their inputs, transfers, turns and errors."""
