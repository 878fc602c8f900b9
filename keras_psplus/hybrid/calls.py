"""Calls of a parameter server's methods, from inside a step's graph and from eager code.

They are TensorFlow's own RPC operations (`tf.distribute.experimental.rpc`). What fails names the
server; what cannot have reached it is tried again for a while, so servers' methods take a call
that comes twice for one.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.distribute.experimental.rpc.kernels import gen_rpc_ops

from keras_psplus.arguments import shown
from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel import Secret
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.core.jobs import failure
from keras_psplus.log import logger
from keras_psplus.tf_internals import resource_variable_ops

# Names of parameter servers' methods, which anybody can list, and the token.
#
# Names contain nothing that would help an attacker: `sessions.Authenticator` and
# `rpc_auth.with_key_check` authenticate calls.


# TensorFlow's message for a method that does not exist.
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
    return given is not None or bool(os.environ.get(TOKEN_VARIABLE))


def method(table: int, what: str) -> str:
    return f"{table}/{what}"


# Of a dynamic table, servers trace methods of other groups than the first when one is to be called.
GROUPS = "training", "reads", "changes"


def group_of(what: str) -> str:
    """The group of a dynamic table's method."""
    if what.startswith(("lookup", "push", "norm", "commit")):
        return "training"
    changes = what == "remove" or what.startswith(("insert", "admit", "clear", "put", "set_"))
    return "changes" if changes else "reads"


def readable(name: str) -> str:
    return f"table {name.replace('/', ', ')}" if "/" in name else name


# Lets only those call a server's methods who can name the job's two secret integers.
#
# Calls for rows are operations of a step's graph, so that the server compares in a graph as well. A
# session in Python, as control calls have one, would cost each of them more than its rows do.


_PURPOSE = "rows"


class RowKey:
    """Two integers that a call for rows begins with.

    They follow from the job's token and a server's first process, so that one in its place goes on
    with them. A variable holds them, as constants would be in saved graphs.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        with tf.init_scope(), tf.device("/CPU:0"):
            self._variable = resource_variable_ops.ResourceVariable(
                tf.zeros([2], tf.int64), trainable=False
            )

    def set(self, process: str) -> None:
        with tf.init_scope():
            self._variable.assign(tf.constant(self._secret.key_words(_PURPOSE, process), tf.int64))

    def read(self) -> tf.Tensor:
        return self._variable.read_value()


def with_key_check(
    function: tf.types.experimental.PolymorphicFunction, key: RowKey
) -> tf.types.experimental.PolymorphicFunction:
    """A method that does what another one does, for those who know the key."""

    @tf.function(
        input_signature=[tf.TensorSpec([2], tf.int64), *function.input_signature], autograph=False
    )
    def method(given: tf.Tensor, *args: tf.Tensor) -> tf.Tensor:
        is_right = tf.reduce_all(tf.equal(given, key.read()))
        refusal = "the caller does not know this job's token. Received: a call without its key"
        with tf.control_dependencies([tf.debugging.Assert(is_right, [refusal])]):
            return function.python_function(*[tf.identity(arg) for arg in args])

    return method


_OK, _CANCELLED, _DEADLINE, _UNAVAILABLE = 0, 1, 4, 14
_AWAY = _CANCELLED, _DEADLINE, _UNAVAILABLE
_PAUSE_SECONDS = 0.2
_ATTEMPT_SECONDS = 10.0
# A server makes its functions ready in the first step, by some seconds of a processor.
_TIMES_AT_FIRST = 5.0
_unique = itertools.count()

# An RPC under way: its resource and the deleter of that.
Future = tuple[tf.Tensor, tf.Tensor]
Shape = Sequence[int | None]


class RpcClient:
    """A client of one parameter server.

    Operations of a graph that share a client are run in the order in which they were traced, so
    what may overlap needs its own link. A server that cannot be reached is called again for
    `patience` seconds; before this process `has_begun` to train, a call may take longer.
    """

    def __init__(
        self,
        name: str,
        address: str,
        timeout: float,
        patience: float,
        recovers: bool = False,
        key: RowKey | None = None,
        has_begun: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name, self.address, self._has_begun = name, address, has_begun
        self._timeout, self._patience, self._recovers = timeout, patience, recovers
        self._rarely: dict[Any, Callable[..., tf.Tensor]] = {}
        self._key = key
        with tf.init_scope(), tf.device("/CPU:0"):
            self._client, _ = gen_rpc_ops.rpc_client(
                server_address=address,
                # A call to a server that has died is answered no earlier.
                timeout_in_ms=int(1000 * min(timeout, _ATTEMPT_SECONDS)),
                shared_name=f"keras_psplus_{next(_unique)}",
                list_registered_methods=False,
            )

    def start(
        self, method: str, args: list[tf.Tensor], dtype: tf.DType, shape: Shape
    ) -> Callable[[], tf.Tensor]:
        """Begins a call; returns a function that waits for its one tensor."""
        args = args if self._key is None else [self._key.read(), *args]
        future = self._call(method, args)
        again = self._rarely_again(method, dtype, shape)

        def wait() -> tf.Tensor:
            code, message = self._status(future)
            answer = tf.cond(
                tf.equal(code, _OK),
                lambda: _value(future, dtype, shape),
                lambda: again(code, message, *args),
            )
            with tf.control_dependencies([answer]):
                _delete(future)
            return tf.ensure_shape(answer, shape)

        return wait

    def call(self, method: str, args: list[tf.Tensor], dtype: tf.DType, shape: Shape) -> tf.Tensor:
        return self.start(method, args, dtype, shape)()

    def _call(self, method: str, args: list[tf.Tensor]) -> Future:
        with tf.device("/CPU:0"):
            return gen_rpc_ops.rpc_call(
                self._client, method_name=method, args=args, timeout_in_ms=0
            )

    def _status(self, future: Future) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("/CPU:0"):
            code, message = gen_rpc_ops.rpc_check_status(future[0])
        return tf.ensure_shape(code, []), tf.ensure_shape(message, [])

    def _rarely_again(self, method: str, dtype: tf.DType, shape: Shape) -> Callable[..., tf.Tensor]:
        """`_again` not inlined, which would make most of a step's graph."""
        key = method, dtype, tuple(shape)
        if key not in self._rarely:

            @tf.function(autograph=False, experimental_attributes={"_noinline": True})
            def again(code: tf.Tensor, message: tf.Tensor, *args: tf.Tensor) -> tf.Tensor:
                return self._again(method, list(args), dtype, shape, code, message)

            self._rarely[key] = again
        return self._rarely[key]

    def _again(
        self,
        method: str,
        args: list[tf.Tensor],
        dtype: tf.DType,
        shape: Shape,
        code: tf.Tensor,
        message: tf.Tensor,
    ) -> tf.Tensor:
        """Calls until it is answered or there is no more patience."""
        began = tf.timestamp()
        empty = tf.zeros([0 if size is None else size for size in shape], dtype)

        def may_come(
            code: tf.Tensor, message: tf.Tensor, answer: tf.Tensor, alive_at: tf.Tensor
        ) -> tf.Tensor:
            away = tf.reduce_any(tf.equal(code, _AWAY))
            if self._recovers:
                # It is there, and will have its tables soon.
                away |= tf.strings.regex_full_match(message, NOT_REGISTERED)
            now = tf.timestamp()
            limit = tf.ensure_shape(tf.numpy_function(self._limit, [], tf.float64), [])
            in_time = tf.logical_and(
                now < began + limit - _ATTEMPT_SECONDS, now < alive_at + self._patience
            )
            return tf.logical_and(away, in_time)

        def try_again(
            code: tf.Tensor, message: tf.Tensor, answer: tf.Tensor, alive_at: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            # There is no operation that sleeps. This path is taken when a server is away only.
            paused = tf.numpy_function(self._pause, [], tf.bool)
            with tf.control_dependencies([paused]):
                future = self._call(method, args)
            code, message = self._status(future)
            answer = tf.cond(
                tf.equal(code, _OK), lambda: _value(future, dtype, shape), lambda: empty
            )
            with tf.control_dependencies([answer]):
                _delete(future)
                # Afterwards: a call that is not answered takes longer than there is patience.
                listens = tf.ensure_shape(tf.numpy_function(self._listens, [], tf.bool), [])
            with tf.control_dependencies([listens]):
                alive_at = tf.where(listens, tf.timestamp(), alive_at)
            return code, message, tf.ensure_shape(answer, shape), alive_at

        scalar = tf.TensorShape([])
        code, message, answer, _ = tf.while_loop(
            may_come,
            try_again,
            (code, message, tf.ensure_shape(empty, shape), began),
            shape_invariants=(scalar, scalar, tf.TensorShape(shape), scalar),
            parallel_iterations=1,
        )
        reason = tf.strings.regex_replace(message, r"(?s)\nAdditional GRPC.*", "")
        listens = tf.ensure_shape(tf.numpy_function(self._listens, [], tf.bool), [])
        silent = tf.where(
            listens,
            "no answer in time; it hangs, or the link is too slow",
            "it cannot be reached any more",
        )
        away = tf.reduce_any(tf.equal(code, [_DEADLINE, _UNAVAILABLE]))
        # Functions traced for an optimizer call methods that go with it.
        replaced = tf.strings.regex_full_match(message, f"(?s).*{OF_OPTIMIZER}.*")
        reason = tf.where(
            replaced,
            "the table's optimizer has been replaced since by another one, and a table has one at "
            "a time. Compile the model again before it trains on",
            reason,
        )
        text = tf.strings.join(
            [
                tf.where(replaced, failure.REFUSED, failure.LOST),
                f"{self.name} ({self.address}) failed at {readable(method)}: ",
                tf.where(away, silent, reason),
            ]
        )
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(code, _OK), [text])]):
            return tf.identity(answer)

    def _pause(self) -> np.bool_:
        time.sleep(_PAUSE_SECONDS)
        return np.bool_(True)

    def _limit(self) -> np.float64:
        return np.float64(self._timeout * (1 if self._has_begun() else _TIMES_AT_FIRST))

    def _listens(self) -> np.bool_:
        return np.bool_(handshake.listens(self.address))


def _value(future: Future, dtype: tf.DType, shape: Shape) -> tf.Tensor:
    with tf.device("/CPU:0"):
        return tf.ensure_shape(gen_rpc_ops.rpc_get_value(future[0], Tout=[dtype])[0], shape)


def _delete(future: Future) -> None:
    with tf.device("/CPU:0"):
        gen_rpc_ops.delete_rpc_future_resource(handle=future[0], deleter=future[1])
