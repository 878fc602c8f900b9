"""Short texts for compressors and ways of updating, such as `"powersgd:4"` and `"local_sgd:8"`.

They are read here without TensorFlow, so that the launcher can refuse wrong ones at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Form(NamedTuple):
    """Form of the value after a name and a colon.

    Attributes:
        type: Makes it of its text, or raises ValueError; None if nothing may stand there.
        needed: Whether something must.
    """

    type: Any
    needed: bool = False


def half(name: str) -> str:
    """The type that `"bf16"` or `"fp16"` stands for."""
    if name not in _HALVES:
        raise ValueError(name)
    return _HALVES[name]


_HALVES = {"bf16": "bfloat16", "fp16": "float16"}

COMPRESSION = {
    "bf16": Form(None),
    "fp16": Form(None),
    "int8": Form(int),
    "sign": Form(int),
    "topk": Form(float, needed=True),
    "randomk": Form(float, needed=True),
    "powersgd": Form(int, needed=True),
    "factors": Form(half),
}
COMPRESSION_ALLOWED = (
    '"bf16", "fp16", "int8", "sign", "topk:0.01" (or another density), "randomk:0.1", '
    '"powersgd:4" (or another rank), "factors", "factors:bf16", "factors:fp16"'
)
UPDATES = {
    "accumulate": Form(int, needed=True),
    "local_sgd": Form(int, needed=True),
    "diloco": Form(int, needed=True),
}
UPDATES_ALLOWED = '"accumulate:4", "local_sgd:8", "diloco:100" (or other numbers of steps)'


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a wrong one is meant to be, or None."""
    return next(iter(difflib.get_close_matches(name, [*known], 1)), None)


def hint(text: object, forms: Mapping[str, Form]) -> str:
    """A sentence with the name that is nearest to a wrong text; empty without one."""
    name, colon, value = text.partition(":") if isinstance(text, str) else ("", "", "")
    near = nearest(name, forms)
    return f" Did you mean {near + colon + value!r}?" if near and near != name else ""


def parse(text: str, forms: Mapping[str, Form]) -> tuple[str, list[Any]] | None:
    """Splits a text into a name and what is after its colon.

    Returns:
        The name and a list of nothing or one value; None if the text is not of these forms.
    """
    name, *values = text.split(":")
    form = forms.get(name)
    if form is None or len(values) not in ((1,) if form.needed else (0, 1) if form.type else (0,)):
        return None
    try:
        return name, [form.type(value) for value in values]
    except ValueError:
        return None
