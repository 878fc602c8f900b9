"""`keras-psplus doctor --hooks`: the functions that are replaced, and what this Keras has."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_psplus.keras_hooks.hook import Hook

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def show(as_json: bool = False) -> int:
    """Prints the list of hooks.

    Args:
        as_json: Whether to print a list of dicts instead of text.

    Returns:
        The exit code: 1 if one does not fit.
    """
    try:
        from keras_psplus.keras_hooks import HOOKS
    except ImportError as error:
        # A part of Keras is gone as a whole: its name is in the error.
        print(
            json.dumps([{"name": None, "fits": False, "problem": f"{error}"}]) if as_json else error
        )
        return 1
    rows = [_row(hook) for hook in HOOKS]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print(_text(rows))
    return 0 if all(row["fits"] for row in rows) else 1


def _row(hook: Hook) -> dict[str, Any]:
    try:
        hook.check_signature()
        problem = None
    except ImportError as error:
        problem = f"{error}"
    return {
        "name": hook.where,
        "parameters": hook.parameters,
        "found": hook.found(),
        "is_added": hook.is_added,
        "fits": problem is None,
        "problem": problem,
        "answered_by": hook.answered_by,
        "why": hook.why,
    }


def _text(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        relied = "is added" if row["is_added"] else f"({', '.join(row['parameters'])})"
        lines.append(f"{row['name']} {relied}")
        lines.append(f"  answered by {row['answered_by']}: {row['why']}")
        if not row["fits"]:
            found = row["found"]
            had = "nothing of this name" if found is None else f"({', '.join(found)})"
            lines.append(f"  DOES NOT FIT: this Keras has {had}")
    bad = sum(not row["fits"] for row in rows)
    lines += ["", f"{len(rows)} functions are replaced; {bad or 'none'} of them do not fit."]
    return "\n".join(lines)
