"""SHA-256 digests, by which damaged files are told from whole ones."""

import hashlib
import json
from typing import Any

import tensorflow as tf

from keras_psplus.files.reading import open_file

_CHUNK_BYTES = 4 << 20
_KEY = "sha256"


def digest_of_file(path: str) -> str:
    """The SHA-256 digest of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def problem_of(path: str, expected: str) -> str | None:
    """Checks a file against its digest.

    Args:
        expected: `digest_of_file` when it was written.

    Returns:
        A text that names the file, or None if it is as it was written.
    """
    if not tf.io.gfile.exists(path):
        return f"{path} is missing"
    try:
        found = digest_of_file(path)
    except (OSError, tf.errors.OpError) as error:
        return f"{path} cannot be read: {error}"
    if found != expected:
        return f"{path} is not as it was written: its SHA-256 is {found}, not {expected}"
    return None


def to_json(content: dict[str, Any], indent: int | None = None) -> str:
    """JSON text of a dict, with a digest of the content."""
    return json.dumps({**content, _KEY: _of_content(content)}, indent=indent)


def from_json(text: str | bytes, must_have_digest: bool = False) -> dict[str, Any]:
    """Reads what `to_json` has made, or any dict without a digest.

    Args:
        must_have_digest: Whether a dict without one is refused.

    Raises:
        ValueError: If it is no dict, or its digest is another.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__} in the place of a JSON object")
    expected = content.pop(_KEY, None)
    if (must_have_digest or expected is not None) and expected != _of_content(content):
        raise ValueError(f"its SHA-256 is {_of_content(content)}, not {expected}")
    return content


def _of_content(content: Any) -> str:
    # As it will be when it is read: keys are text then, and tuples are lists.
    read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()
