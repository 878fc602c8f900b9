"""The control channel: who is listened to, and what others can make a server do."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from keras_psplus.cluster import channel, handshake, preflight
from keras_psplus.cluster.channel import (
    METHOD,
    AnotherProcessError,
    Authenticator,
    ChannelClient,
    ChannelError,
    ChannelServer,
    ConnectionWatch,
    JobSecret,
    RefusedError,
    Secret,
    Session,
)
from keras_psplus.cluster.config import ClusterConfigError, TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.handshake import Listener, PeerIdentity
from keras_psplus.cluster.ports import control_address, free_ports
from keras_psplus.errors import ClusterStartupError
from keras_psplus.hybrid.servers import ControlLink
from tests.cluster import certificates
from tests.support.jobs import WITHOUT_TENSORFLOW, environment, run_in_processes, wait_for
from tests.support.tables import for_each
from tests.support.tiers import extended

VARIABLES = (channel.CERT, channel.KEY, channel.CA, channel.NAME)


@pytest.fixture(autouse=True)
def no_tls(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Echo:
    """A server that notes what it is asked, and says it again."""

    def __init__(self, token="of the job"):
        (port,) = free_ports(1)
        self.address, self.heard, self.refused = f"127.0.0.1:{port}", [], []
        self.gate = Authenticator(Secret(token), "another token")
        self._server = ChannelServer(
            self.address, self.gate, self._handle, refuse=self.refused.append
        )

    def _handle(self, body, host):
        self.heard.append((body, host))
        return f"heard {body}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.close()


def session(client, token="of the job", sent=None):
    def send(text):
        if sent is not None:
            sent.append(text)
        return client.send(text, 5)

    return Session(Secret(token), send)


def test_who_knows_the_token_is_answered_and_nobody_else():
    with Echo() as echo, ChannelClient(echo.address, None) as client:
        sent = []
        mine = session(client, sent=sent)
        assert [mine.ask(f"{n}") for n in range(600)][::599] == ["heard 0", "heard 599"]
        assert not any("of the job" in text for text in sent)
        for token in ("another", ""):
            with pytest.raises(RefusedError, match="another token"):
                session(client, token).ask("x")
        assert echo.refused == ["127.0.0.1"] * 2
        assert [body for body, _ in echo.heard] == [f"{n}" for n in range(600)]
        # Nothing that was overheard says anything anew, to this process or to the next.
        for text in (sent[-1], sent[1], sent[-1].replace('"number": 600', '"number": 601')):
            assert client.send(text, 5) in ('{"unknown": true}', '{"error": "another token"}')
        assert len(echo.heard) == 600


def test_an_answer_of_another_call_or_process_is_none():
    with Echo() as echo, ChannelClient(echo.address, None) as client:
        answers = []

        def replayed(text):
            answers.append(client.send(text, 5))
            return answers[1] if len(answers) > 2 else answers[-1]

        mine = Session(Secret("of the job"), replayed)
        assert mine.ask("one") == "heard one"
        with pytest.raises(RefusedError, match="without proof"):
            mine.ask("two")
        meant = Session(Secret("of the job"), lambda text: client.send(text, 5), process="another")
        with pytest.raises(AnotherProcessError):
            meant.ask("three")


def test_a_server_that_forgets_requests_begins_another_session(monkeypatch):
    monkeypatch.setattr(channel, "_MOST_REQUESTS", 3)
    with Echo() as echo, ChannelClient(echo.address, None) as client:
        sent = []
        old = session(client, sent=sent)
        assert old.ask("x") == "heard x"
        for _ in range(5):
            session(client).ask("y")
        assert not echo.gate._seen
        assert client.send(sent[1], 5) == '{"unknown": true}'
        assert old.ask("z") == "heard z" and len(echo.heard) == 7
        assert sum("open" in json.loads(text) for text in sent) == 2


def test_a_busy_server_is_asked_again(monkeypatch):
    monkeypatch.setattr(channel, "_MOST_CALLS", 1)
    inside, goes_on = threading.Event(), threading.Event()

    def handle(body, host):
        inside.set()
        goes_on.wait(20)
        return "{}"

    (port,) = free_ports(1)
    address, secret = f"127.0.0.1:{port}", Secret("of the job")
    held = ChannelServer(control_address(address), Authenticator(secret, ""), handle)
    link = ControlLink("ps-0", address, secret, 20)
    first = threading.Thread(target=lambda: link.request("first"))
    try:
        first.start()
        assert inside.wait(10)
        with pytest.raises(OSError, match="busy"):
            job, mine = JobSecret(secret, True), PeerIdentity("worker-1", "{}", "b", 1, "y")
            handshake.dial(control_address(address), mine, job)
        wait = ControlLink("ps-0", address, secret, 20).begin("second")
        goes_on.set()
        assert wait() == {}
    finally:
        goes_on.set()
        first.join()
        held.close()
    for thread in held._pool._threads:
        thread.join(10)
        assert not thread.is_alive()


def test_garbage_and_silence_are_bounded(monkeypatch):
    monkeypatch.setattr(channel, "_HANDSHAKE_SECONDS", 1)
    with Echo() as echo, ChannelClient(echo.address, None) as client:
        for text in ("", "[", "{}", '"', "[" * 5000, '{"open": {}}', '{"caller": 1e400}'):
            answer = json.loads(client.send(text, 5))
            assert set(answer) in ({"error"}, {"session", "process", "hint"})
        with pytest.raises(ChannelError, match="1100000 bytes is larger than"):
            client.send("x" * 1_100_000, 5)
        monkeypatch.setattr(channel, "LONGEST", 1 << 30)
        with pytest.raises(ChannelError, match="larger than max"):
            client.send("x" * 1_100_000, 5)
        host, port = echo.address.split(":")
        silent = [socket.create_connection((host, int(port)), 5) for _ in range(300)]
        for number, connection in enumerate(silent):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: number % 20])
        with ChannelClient(echo.address, None) as another:
            assert session(another).ask("x") == "heard x"
        for connection in silent:
            connection.settimeout(20)
            try:
                while connection.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            connection.close()
        assert not echo.refused and [body for body, _ in echo.heard] == ["x"]


SERVER = (
    WITHOUT_TENSORFLOW
    + """
import time
from keras_psplus.cluster.channel import ChannelServer
from keras_psplus.cluster.channel import Authenticator
from keras_psplus.cluster.channel import Secret

gate = Authenticator(Secret("of the job"), "")
server = ChannelServer(sys.argv[1], gate, lambda body, host: body)
print("listens", flush=True)
time.sleep(300)
"""
)


@pytest.mark.processes
def test_a_stopped_and_a_killed_task_are_silent_until_they_are_there_again():
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"

    def start():
        command = [sys.executable, "-c", SERVER, address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
        assert process.stdout.readline() == b"listens\n"
        return process

    server = start()
    # Nobody has ever been at the other address.
    watch = ConnectionWatch({"ps-0": address, "ps-1": f"127.0.0.1:{port + 1}"}, timeout=0.8)
    try:
        assert watch.wait_for_connection("ps-0", 0) == 1
        time.sleep(1)
        assert watch.silences() == {}
        # Its kernel goes on accepting connections.
        server.send_signal(signal.SIGSTOP)
        wait_for(lambda: watch.silences().get("ps-0", 0.0) > 0.8)
        server.send_signal(signal.SIGCONT)
        made = watch.wait_for_connection("ps-0", 1)
        assert watch.silences() == {}
        server.kill()
        wait_for(lambda: [*watch.silences()] == ["ps-0"])
        server.wait()
        server = start()
        assert watch.wait_for_connection("ps-0", made) > made
    finally:
        watch.close()
        server.kill()
        server.wait()


def test_a_fork_of_a_process_with_a_channel_says_what_it_cannot():
    with Echo() as echo, ChannelClient(echo.address, None) as client:
        assert session(client).ask("parent") == "heard parent"
        pid = os.fork()
        if not pid:
            code = 1
            try:
                session(client).ask("child")
            except RuntimeError as error:
                code = "fork of one that has joined a cluster" not in str(error)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session(client).ask("parent again") == "heard parent again"


def setenv(monkeypatch, variables):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    authority, other = (certificates.make(folder, name) for name in ("ca", "other-ca"))
    return {
        "plain": {},
        "shared": authority,
        "mutual": certificates.make(folder, "task", authority),
        "other": certificates.make(folder, "other-task", other),
        # Trusts the authority, and has a certificate of another one.
        "stranger": {**certificates.make(folder, "stranger"), channel.CA: authority[channel.CERT]},
    }


@for_each(
    "server, caller, problem",
    [
        ("shared", "shared", None),
        ("mutual", "mutual", None),
        ("mutual", "other", "the TLS handshake failed.*CERTIFICATE_VERIFY_FAILED"),
        ("mutual", "stranger", "the TLS handshake failed"),
        ("mutual", "plain", "it speaks TLS, and this task does not"),
        ("shared", "plain", "it speaks TLS, and this task does not"),
        ("plain", "mutual", "it does not speak TLS, and this task does"),
    ],
)
def test_tasks_know_each_other_by_certificates(monkeypatch, pki, server, caller, problem):
    (port,) = free_ports(1)
    address, job = f"127.0.0.1:{port}", JobSecret(Secret("x"), True)
    setenv(monkeypatch, pki[server])
    listener = Listener(port, PeerIdentity("worker-0", "{}", "a", 1, "x"), job)
    try:
        setenv(monkeypatch, pki[caller])
        mine = PeerIdentity("worker-1", "{}", "b", 1, "y")
        if problem is None:
            assert handshake.dial(address, mine, job).task == "worker-0"
            assert listener.callers == {"worker-1"}
            with pytest.raises(handshake.StrangerError):
                handshake.dial(address, mine, JobSecret(Secret("y"), True))
        else:
            with pytest.raises(OSError, match=problem):
                handshake.dial(address, mine, job)
            assert not listener.callers
    finally:
        listener.close()


def test_tls_on_one_side_is_told_by_the_last_one_too(monkeypatch, pki):
    """The other task has said so, and ended."""
    ports = free_ports(2)
    cluster = {"worker": tuple(f"127.0.0.1:{port}" for port in ports)}
    config = TaskConfig(cluster, "worker", 1)
    setenv(monkeypatch, pki["shared"])
    first = PeerIdentity.of(TaskConfig(cluster, "worker", 0))
    listener = Listener(ports[0], first, JobSecret.of(config))
    setenv(monkeypatch, pki["plain"])
    threading.Timer(3.0, listener.close).start()
    with pytest.raises(ClusterStartupError, match="worker-0 at .*: it speaks TLS, and this task"):
        preflight.wait_for_cluster(config, timeout=6)


def test_mutual_tls_takes_no_caller_without_a_certificate(monkeypatch, pki):
    setenv(monkeypatch, pki["mutual"])
    with Echo() as echo:
        own = channel.Tls.from_env()
        grpc = pytest.importorskip("grpc")
        with grpc.secure_channel(echo.address, grpc.ssl_channel_credentials(own.ca)) as plain:
            with pytest.raises(grpc.RpcError) as error:
                plain.unary_unary(METHOD)(b'{"open": "x"}', timeout=5)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        with ChannelClient(echo.address, own) as client:
            assert session(client).ask("x") == "heard x"


def test_tensorflows_server_counts_as_up_under_tls(monkeypatch, pki):
    """It speaks no TLS, and knows no such method."""
    grpc = pytest.importorskip("grpc")
    from concurrent import futures

    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    setenv(monkeypatch, pki["mutual"])
    mine = PeerIdentity("worker-1", "{}", "b", 1, "y")
    try:
        assert handshake.dial(address, mine, JobSecret(Secret("x"), True)) is None
        assert handshake.tensorflow_responds(address, 5)
    finally:
        server.stop(0).wait()


def test_tasks_find_each_other_by_tls(monkeypatch, pki):
    setenv(monkeypatch, pki["mutual"])
    ports = free_ports(2)
    cluster = {"worker": tuple(f"127.0.0.1:{port}" for port in ports)}
    outcomes = {}

    def wait(index):
        preflight.wait_for_cluster(TaskConfig(cluster, "worker", index), timeout=20)
        outcomes[index] = "found"

    threads = [threading.Thread(target=wait, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == {0: "found", 1: "found"}


def test_files_that_do_not_go_together_are_named(monkeypatch, pki, tmp_path):
    task, other = pki["mutual"], pki["other"]
    for variables, message in [
        ({channel.CERT: task[channel.CERT]}, "KERAS_PSPLUS_TLS_KEY is not set"),
        ({channel.CA: task[channel.CA]}, "KERAS_PSPLUS_TLS_CERT is not set"),
        ({channel.NAME: "task"}, "KERAS_PSPLUS_TLS_CERT is not set.*TLS_NAME=task"),
        ({**task, channel.KEY: other[channel.KEY]}, "its own key.*MISMATCH"),
        (
            {**task, channel.KEY: str(tmp_path / "none")},
            "TLS_KEY cannot be read: No such",
        ),
        (
            {**task, channel.CA: task[channel.KEY]},
            "KERAS_PSPLUS_TLS_CA must be a PEM file of certificates",
        ),
    ]:
        setenv(monkeypatch, variables)
        with pytest.raises(ClusterConfigError, match=message) as error:
            channel.Tls.from_env()
        assert "Received: KERAS_PSPLUS_TLS_CERT=" in str(error.value)
    setenv(monkeypatch, task)
    assert "PRIVATE" not in repr(channel.Tls.from_env())


JOB = """
import sys
import keras, numpy as np
import keras_psplus as psp

kind = {"hybrid": psp.HybridStrategy, "ps": psp.ParameterServerStrategy}[sys.argv[1]]
strategy = kind(min_table_bytes=1) if sys.argv[1] == "hybrid" else kind()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4)])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
x = np.arange(48).reshape(16, 3) % 20
loss = model.fit(x, np.ones((16, 1)), batch_size=8, epochs=2, verbose=0).history["loss"]
print("losses", loss[0] > loss[1])
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", extended("hybrid", "ps"))
def test_a_job_with_a_token_and_mutual_tls_trains(pki, kind):
    layout = {"workers": 1 + (kind == "hybrid"), "ps": 1, "chief": kind == "ps"}
    env = {**pki["mutual"], TOKEN_VARIABLE: "of the job"}
    result = run_in_processes(JOB, kind, **layout, env=env, timeout=300)
    assert "losses True" in result.logs["chief-0" if kind == "ps" else "worker-0"]
    assert set(result.exit_codes.values()) == {0}
