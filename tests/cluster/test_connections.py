"""Connections of this process."""

import contextlib
import socket

from keras_psplus.cluster.monitor import step_times


def test_connections_to_an_address_are_cut():
    with contextlib.ExitStack() as ends:

        def connect(listener, family, host):
            client = ends.enter_context(socket.socket(family))
            client.connect((host, listener.getsockname()[1]))
            client.settimeout(20)
            server, _ = listener.accept()
            ends.enter_context(server)
            return client, server

        listeners = [ends.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        # As gRPC connects to an address of IPv4.
        cut = [
            connect(listeners[0], socket.AF_INET, "127.0.0.1"),
            connect(listeners[0], socket.AF_INET6, "::ffff:127.0.0.1"),
        ]
        client, server = connect(listeners[1], socket.AF_INET, "127.0.0.1")
        step_times.cut(f"127.0.0.1:{listeners[0].getsockname()[1]}")
        assert [end.recv(1) for pair in cut for end in pair] == [b""] * 4
        server.sendall(b"more")
        assert client.recv(4) == b"more"
        step_times.cut(f"localhost:{listeners[1].getsockname()[1]}")
        assert client.recv(1) == b""
