"""Names of the methods that parameter servers answer to.

All but one carry a digest of the job's token, so that another job's client finds nothing it could
call, at no cost to the calls of this one.
"""

import hashlib
import json
import os

from keras_psplus.cluster.environment import TOKEN_VARIABLE

CONTROL = "control"
# How TensorFlow says that there is no such method.
NOT_REGISTERED = "(?s).* is not registered.*"
# The same of those that go with an optimizer.
OF_OPTIMIZER = r"/(push|norm|commit)\d+ is not registered"


def token_of(task, given):
    """The job's token: given, from the environment, or made of the cluster's description."""
    if given is not None:
        if not isinstance(given, str) or not given:
            raise ValueError(f"`job_token` must be a text. Received: job_token={given!r}")
        return given
    return os.environ.get(TOKEN_VARIABLE) or json.dumps(task.cluster, sort_keys=True)


def digest_of(token):
    """What a token shows of itself on the wire."""
    return hashlib.sha256(token.encode()).hexdigest()[:24]


def method(digest, table, what):
    """The name of one method of one table, by the table's number."""
    return f"{digest}/{table}/{what}"


def readable(name):
    """A method's name for people."""
    _, _, rest = name.partition("/")
    return f"table {rest.replace('/', ', ')}" if rest else name
