"""Calls by which a script leaves it to another library that its processes train together."""

import os
import re

_MIRRORED = "strategy = keras_psplus.MultiWorkerMirroredStrategy()"
# Patterns of them, with the line to write in their place.
_FOREIGN = {
    r"\btf\.distribute\.(?:experimental\.)?(?:MultiWorker)?MirroredStrategy\(": _MIRRORED,
    r"\btf\.distribute\.(?:experimental\.)?ParameterServerStrategy\(": (
        "strategy = keras_psplus.ParameterServerStrategy()"
    ),
    r"\bhvd\.init\(": _MIRRORED,
    r"\b(?:torch\.distributed|dist)\.init_process_group\(": _MIRRORED,
}
_OWN = re.compile(
    r"\bstrategy_from_env\(|(?<!distribute\.)(?<!experimental\.)"
    r"\b(?:MultiWorkerMirrored|ModelParallel|Pipeline|ParameterServer|Hybrid)Strategy\("
)


def find(path: str, script: str) -> list[str]:
    """Sentences on such calls in a script's text, with what to write."""
    is_keras_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
    if is_keras_2 or re.search("tf_keras|TF_USE_LEGACY_KERAS", script):
        return []
    found: dict[str, tuple[int, str, str]] = {}
    for number, line in enumerate(script.splitlines(), 1):
        for pattern, ours in _FOREIGN.items():
            if call := re.search(pattern, line.partition("#")[0]):
                found.setdefault(pattern, (number, f"{call.group()}...)", ours))
    return [
        f"{path}:{number}: {call} does not have the tasks train together under Keras 3: write "
        f"`{ours}`, and `with strategy.scope():` where the model is made"
        for number, call, ours in found.values()
    ]


def are_alone(script: str) -> bool:
    """Whether a script of Keras's makes no strategy of this library beside them."""
    return "keras" in script and not _OWN.search(script)
