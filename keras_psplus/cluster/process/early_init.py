"""Finds the call that started TensorFlow's runtime before the strategy was made.

A strategy has to configure the runtime before its first operation. Stock
TensorFlow then says "Collective ops must be configured at program startup"
and leaves the search for the operation to the user.
"""

import dataclasses
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from typing import Any

from keras_psplus.cluster.process.warm_server import WARM_START
from keras_psplus.log import logger
from keras_psplus.tf_internals import context as _tf_context

_MAX_FRAMES = 3


@dataclasses.dataclass
class _State:
    installed: bool = False
    frames: tuple[Any, ...] | None = None  # the user's frames of the call, innermost last
    has_strategy: bool = False


_state = _State()


def install() -> None:
    """Records, from now on, which call starts TensorFlow's runtime.

    It costs nothing after that call: the recorder removes itself. Called at
    `import keras_psplus`.
    """
    context = _tf_context.context()
    if _state.installed or context._context_handle is not None:
        return
    _state.installed = True
    original = context.ensure_initialized

    def record_and_initialize() -> Any:
        _remove(context)
        _state.frames = _user_frames(traceback.extract_stack())
        return original()

    # On the instance, so that TensorFlow's class stays as it is.
    context.ensure_initialized = record_and_initialize


def disarm() -> None:
    """Stops recording, as a strategy starts the runtime."""
    _remove(_tf_context.context())
    _state.installed = False
    _state.frames = None
    _state.has_strategy = True


def check_not_initialized(what: str) -> None:
    """Checks that TensorFlow's runtime is not started yet."""
    if _tf_context.context()._context_handle is None:
        return
    if _state.frames:
        shown = "\n".join(f"  {_describe(*frame)}" for frame in _state.frames)
        cause = f"It was started by this call (innermost last):\n{shown}\n"
    elif _state.installed:
        cause = "It was started by a call from inside a library. "
    elif _state.has_strategy:
        cause = "It was started for another strategy: a process has one. "
    else:
        cause = "It was started before `import keras_psplus`. "
    raise RuntimeError(
        f"{what} has to be made before TensorFlow runs its first operation, but TensorFlow's "
        f"runtime is started already. {cause}Make the strategy first, right after the imports, "
        "and everything that touches tensors, variables, random generators or "
        f"`tf.config.list_logical_devices` after it. Received: {what} after the first operation"
    )


def _remove(context: Any) -> None:
    context.__dict__.pop("ensure_initialized", None)


def _user_frames(stack: traceback.StackSummary) -> tuple[tuple[str, int, str], ...]:
    """The innermost calls that are neither TensorFlow's, Keras's, Python's nor ours."""
    library_paths: tuple[str, ...]
    library_paths = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    library_paths += (sysconfig.get_path("stdlib"), __file__.rpartition("cluster")[0], "<frozen")
    # Packages may lie elsewhere, as those of a user or of another environment do.
    library_paths += (_tf_context.__file__.rpartition("tensorflow")[0],)
    users = [f for f in stack if not f.filename.startswith(library_paths)]
    return tuple((f.filename, f.lineno or 0, f.name) for f in users[-_MAX_FRAMES:])


def _describe(filename: str, line: int, function: str) -> str:
    source = linecache.getline(filename, line).strip()
    return f"{filename}:{line} in {function}" + (f": {source}" if source else "")


# Names variables that a script sets too late, where TensorFlow was imported before it began.


# It only decides what TensorFlow says of itself.
_HARMLESS = "TF_CPP_MIN_LOG_LEVEL"


def warn(environ: Mapping[str, str]) -> None:
    """Warns of variables of TensorFlow that this process's script has set, if it started warm."""
    if WARM_START not in sys.modules:
        return
    before = sys.modules[WARM_START].environ
    names = {n for n in {*before, *environ} if n.startswith("TF_") and n != _HARMLESS}
    late = sorted(name for name in names if before.get(name) != environ.get(name))
    if late:
        logger.warning(
            "%s: set or changed by the script, after TensorFlow was imported for it (`--warm`). "
            "What TensorFlow reads then has to be set before the launcher is started. "
            "Received: %s",
            ", ".join(late),
            ", ".join(f"{name}={environ.get(name)}" for name in late),
        )
