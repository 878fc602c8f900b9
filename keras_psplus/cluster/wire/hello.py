"""Lines that two tasks exchange before TensorFlow starts, with task and cluster.

    caller                                  listener
      nonce           --------------------->
                      <---------------------  nonce
      identity, proof --------------------->
                      <---------------------  identity, proof

A proof is the signature of both nonces and of the identity, by the job's secret. Who has none
learns no address and is not listened to.
"""

import dataclasses
import json
import os
import secrets
from typing import Self

from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.secret import Secret, is_same
from keras_psplus.cluster.wire.identity import PeerIdentity, json_object

CALLER, LISTENER = "caller", "listener"
_MAGIC = b"keras-psplus hello 2 "
_MAX_LINE = 65536  # bytes: the hosts of some thousand tasks


@dataclasses.dataclass(frozen=True)
class JobSecret:
    """The secret by which the tasks of a job know each other before TensorFlow starts.

    Attributes:
        secret: The `Secret` of the job's token; without a token, of what all of its tasks know.
        is_token: Whether there is a token.
    """

    secret: Secret
    is_token: bool

    @classmethod
    def of(cls, config: TaskConfig) -> Self:
        """Makes the secret of a cluster's tasks."""
        return cls.of_text(json.dumps(config.cluster, sort_keys=True))

    @classmethod
    def of_text(cls, known: str) -> Self:
        """Makes the secret of processes that all know a text."""
        token = os.environ.get(TOKEN_VARIABLE)
        return cls(Secret(token or known), bool(token))

    def proof(self, role: str, nonces: tuple[str, ...], identity: str) -> str:
        """Returns the signature of an identity in one exchange."""
        return self.secret.sign("hello", role, *nonces, identity).hex()


def new_nonce() -> str:
    """Returns a random text that is used once."""
    return secrets.token_hex(16)


def line_of(**fields: str) -> bytes:
    """Returns the line with some texts."""
    return _MAGIC + json.dumps(fields).encode() + b"\n"


def fields_of(line: bytes, *names: str) -> tuple[str, ...] | None:
    """Reads the values of some names in a line; None for another kind of line."""
    if not line.startswith(_MAGIC) or not line.endswith(b"\n") or len(line) > _MAX_LINE:
        return None
    fields = json_object(line[len(_MAGIC) :])
    values = tuple(fields.get(name) for name in names)
    good = all(isinstance(value, str) for value in values)
    return tuple(map(str, values)) if good else None


def introduction(mine: PeerIdentity, job: JobSecret, role: str, nonces: tuple[str, ...]) -> bytes:
    """Returns the line that says who this is, with its proof."""
    text = mine.encode()
    return line_of(identity=text, proof=job.proof(role, nonces, text))


def introduced(
    line: bytes, job: JobSecret, role: str, nonces: tuple[str, ...]
) -> PeerIdentity | None:
    """Returns the sender that a line names, proven or not; None if it names none."""
    fields = fields_of(line, "identity", "proof")
    if fields is None:
        return None
    text, proof = fields
    return PeerIdentity.decode(text, is_same(proof, job.proof(role, nonces, text)))


def is_whole(line: bytes) -> bool:
    """Whether a line has been read completely: it has its end, or is no hello."""
    is_hello = line.startswith(_MAGIC[: len(line)])
    return line.endswith(b"\n") or len(line) >= _MAX_LINE or not is_hello
