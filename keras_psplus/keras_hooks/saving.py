"""Saving: files and folders appear whole, and the paths that are shown are the script's."""

from typing import Any

from keras_psplus.core.models import model_saving
from keras_psplus.keras_hooks.hook import Hook, of_archive, of_exported, of_holder, of_scope
from keras_psplus.keras_internals.keras_parts import (
    ExportArchive,
    io_utils,
    model_module,
    saving_lib,
)
from keras_psplus.serving.export import export_archive, export_model


def _of_writing(_: Any) -> object | None:
    return model_saving.SHOWN if model_saving.SHOWN.is_writing else None


HOOKS = (
    *(
        Hook(
            model_module.Model,
            name,
            ["self", "filepath", "overwrite"],
            of_holder,
            "save",
            "files appear whole, whichever workers write them",
        )
        for name in ("save", "save_weights")
    ),
    Hook(
        model_module.Model,
        "export",
        ["self", "filepath", "format"],
        of_exported,
        export_model,
        "folders appear whole; variables of parameter servers are copied to the chief; so are "
        "dynamic tables, which are part of the graph then",
    ),
    Hook(
        ExportArchive,
        "write_out",
        ["self", "filepath"],
        of_archive,
        export_archive,
        "as `export`: what is exported is traced then",
        call="export",
    ),
    Hook(
        saving_lib,
        "get_attr_skipset",
        ["obj_type"],
        of_scope,
        model_saving.attributes_to_skip,
        "Keras makes an optimizer to see its attributes, which must not be in the scope",
    ),
    Hook(
        saving_lib,
        "is_memory_sufficient",
        ["model"],
        of_holder,
        "save",
        "Keras has a whole model in memory before it is in a file, if this machine has room for it",
        call="has_memory_for_file",
    ),
    Hook(
        io_utils,
        "print_msg",
        ["message"],
        _of_writing,
        "show_message",
        "Keras says the path that the script has given, not that of a temporary folder",
    ),
)
