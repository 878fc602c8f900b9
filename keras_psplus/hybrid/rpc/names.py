"""Names of parameter servers' methods, which anybody can list, and the token.

Names contain nothing that would help an attacker: `sessions.Authenticator` and
`rpc_auth.with_key_check` authenticate calls.
"""

import json
import os

from keras_psplus.arguments import shown
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.log import logger

# How TensorFlow says that there is no such method.
NOT_REGISTERED = "(?s).* is not registered.*"
# The same of those that go with an optimizer.
OF_OPTIMIZER = r"/(push|norm|commit)\d+ is not registered"


def token_of(task: TaskConfig, given: str | None) -> str:
    """The job's token: given, from the environment, or made of the cluster's description."""
    if given is not None:
        if not isinstance(given, str) or not given:
            raise ValueError(f"`job_token` must be a text. Received: job_token={shown(given)}")
        return given
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        token = json.dumps(task.cluster, sort_keys=True)
        if task.is_chief or task.task_type == "ps":
            logger.warning(
                "this job has no token: anybody who reaches its parameter servers and knows its "
                "TF_CONFIG can read and change their tables. Give all tasks the same long random "
                "text in %s, as `keras-psplus run` does, or as `job_token`. Received: none",
                TOKEN_VARIABLE,
            )
    return token


def is_secret(given: str | None) -> bool:
    """Whether the job's token is more than the cluster's description."""
    return given is not None or bool(os.environ.get(TOKEN_VARIABLE))


def method(table: int, what: str) -> str:
    """The name of one method of one table, by the table's number."""
    return f"{table}/{what}"


def readable(name: str) -> str:
    """A method's name for people."""
    return f"table {name.replace('/', ', ')}" if "/" in name else name
