"""Imports the library's modules for the forks of `warm.py`, which import the package itself.

Its import checks versions and prepares the hooks of the process that it is in; modules only define.
"""

import importlib
import importlib.machinery
import sys

_NAME = "keras_psplus"
_PARTS = (
    *("errors", "compression", "updates", "tables", "layers", "callbacks", "serving"),
    *("activation", "catalogue", "keras_hooks", "native", "sidecar_evaluator"),
    *("all_reduce.strategy", "all_reduce.engine", "sharding.engine", "tensor_parallel"),
    *("parameter_server.strategy", "parameter_server.engine", "cluster.in_process"),
    *("hybrid.strategy", "hybrid.engine", "pipeline.strategy", "pipeline.engine"),
)


class _Finder:
    """Finds the package, and has it know its modules that are imported already."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        create = spec.loader.exec_module

        def exec_module(module):
            for full, part in list(sys.modules.items()):
                parent, _, own = full.rpartition(".")
                if parent == _NAME:
                    setattr(module, own, part)
            create(module)

        spec.loader.exec_module = exec_module
        return spec


def _import_parts():
    own, sys.argv[0] = sys.argv[0], "keras-psplus"  # The launcher's import prepares nothing.
    package = importlib.import_module(_NAME)
    sys.argv[0] = own
    package._is_loading = True  # What is imported here asks for other parts.
    for part in _PARTS:
        importlib.import_module(f"{_NAME}.{part}")
    del sys.modules[_NAME]
    sys.meta_path.insert(0, _Finder)


_import_parts()
