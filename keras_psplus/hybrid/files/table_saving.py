"""The part of `HybridStrategy` by which a script saves and loads tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from keras_psplus.core.jobs.control import run_on_chief
from keras_psplus.files import tables
from keras_psplus.hybrid.files import saving

if TYPE_CHECKING:
    from keras_psplus.hybrid.context import TableContext


class TableSaving:
    """Methods of a strategy that save and load tables on parameter servers."""

    # Of the strategy.
    extended: Any
    is_chief: Any
    _context: TableContext | None

    def save_tables(self, directory: str | os.PathLike[str]) -> None:
        """Has the parameter servers write the tables, each its own rows, past the workers' memory.

        The optimizer's variables of the tables are written as well; dense weights are not. Call it
        between calls of `fit`, on the chief or on all workers, of whom the chief has it done.
        `load_tables` reads it, also on another number of servers, and `TableFiles` in any process.

        Args:
            directory: Folder that all parameter servers reach. On separate disks, each of them
                has to run on the same host when the tables are loaded.

        Raises:
            TableServerError: If a server cannot write there, or is lost. What was saved there
                before is as it was.
            OSError: If the chief cannot write there.

        Example:

        ```python
        model.fit(dataset)
        strategy.save_tables("/shared/tables")
        ```
        """
        if self.is_chief and self._context is not None:
            path = tables.full_path(directory)
            saving.save(self._context.servers, self._context.tables.all, path)

    def load_tables(self, directory: str | os.PathLike[str]) -> None:
        """Has the parameter servers read what `save_tables` has written; on all workers.

        Tables are found by their names. The optimizer's variables are read where the model is
        compiled with the same one, and `model.optimizer.build(model.trainable_variables)` or `fit`
        has been called.

        Args:
            directory: The folder.

        Raises:
            ValueError: If it does not have all tables, in these shapes.
            TableServerError: If a server cannot read there, or is lost.
        """
        if (context := self._context) is None:
            return
        path = tables.full_path(directory)
        run_on_chief(
            self.extended.control,
            self.is_chief,
            "load_tables",
            lambda: saving.load(context.servers, context.tables.all, path),
        )
        self.extended.rows_ahead.forget()
        self.extended.row_caches.forget()
