"""What somebody without the job's token can try on a table server: TensorFlow's own client."""

import json

import tensorflow as tf

from keras_psplus.cluster.channel import ChannelClient
from keras_psplus.cluster.ports import control_address


def attack(address, folder, dim=3):
    """Calls all that the server lists, as a client that knows their signatures.

    Args:
        address: The server's.
        folder: One that no request may make.
        dim: Numbers in a row.

    Returns:
        How many methods were called.
    """
    client = tf.distribute.experimental.rpc.Client.create("grpc", address, timeout_in_ms=10_000)
    names = sorted(client._method_registry)
    assert names
    arguments = {
        "lookup": [tf.constant([0, 1])],
        "lookup_at": [tf.constant(0, tf.int64), tf.constant([0, 1])],
        "read": [tf.constant(0), tf.constant(1)],
        "write": [tf.constant(0), tf.fill([1, dim], 7.0)],
    }
    for name in names:
        what = name.partition("/")[2].rstrip("0123456789")
        for key in ([0, 0], [1, -1], [2**63 - 1, 5]):
            own = [tf.constant(key, tf.int64), *arguments.get(what, [])]
            reason = "does not know this job" if what in arguments else None
            answer = _refusal(client, name, own)
            if "Expects arg" in answer:
                # Dynamic tables have keys of 64 bits.
                wide = [tf.cast(one, tf.int64) if one.dtype == tf.int32 else one for one in own]
                answer = _refusal(client, name, wide)
            assert reason is None or reason in answer, answer
        _refusal(client, name, arguments.get(what, []))
    for what in ("check_directory", "begin_save", "who", "shutdown", "table"):
        body = json.dumps({"what": what, "ticket": "1", "directory": folder, "stem": "mine"})
        channel = ChannelClient(control_address(address), None)
        session = json.loads(channel.send('{"open": "me"}', 10))["session"]
        for message in (
            {"what": what, "ticket": "1", "token": "", "directory": folder, "stem": "mine"},
            {"caller": "me", "session": session, "number": 1, "body": body, "proof": "0" * 64},
            {"caller": "me", "session": "0.0.0", "number": 1, "body": body, "proof": ""},
        ):
            answer = json.loads(channel.send(json.dumps(message), 10))
            assert "error" in answer or "unknown" in answer, answer
            assert "body" not in answer
    return len(names)


def _refusal(client, name, arguments):
    """The text that the server refuses a call with.

    TensorFlow's result of a call adds an operation to whatever graph is being traced when it goes.
    So it goes here, not with the frames of an exception that the garbage collector finds later.
    """
    result = client.call(name, arguments, output_specs=tf.TensorSpec([], tf.string))
    is_ok, error = bool(result.is_ok()), str(result.get_error())
    del result
    assert not is_ok, f"{name} was answered"
    return error
