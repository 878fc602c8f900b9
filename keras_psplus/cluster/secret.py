"""Secrets that the tasks of a job share, and never send."""

import hashlib
import hmac
import json


class Secret:
    """A job's token."""

    def __init__(self, token: str) -> None:
        self._key = hashlib.sha256(b"keras_psplus job token " + token.encode()).digest()

    def sign(self, *texts: str) -> bytes:
        return hmac.digest(self._key, json.dumps(texts).encode(), "sha256")

    def key_words(self, *texts: str) -> list[int]:
        """Two integers of 64 bits that only who knows the token can name."""
        signature = self.sign("words", *texts)
        return [int.from_bytes(signature[i : i + 8], "big", signed=True) for i in (0, 8)]


def is_same(one: str, other: str) -> bool:
    """Whether two texts are the same; how long that takes tells nothing of them."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
