"""A table server and its clients in one process: what it refuses, and that it survives it."""

import contextlib
import json
import os
import socket
import tempfile
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.cluster.channel import Secret
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig
from keras_psplus.cluster.ports import free_ports
from keras_psplus.errors import TableServerError, TableServerLostError
from keras_psplus.files.tables import read_list
from keras_psplus.hybrid import saving
from keras_psplus.hybrid import servers as servers_module
from keras_psplus.hybrid.server.shard import DynamicShard
from keras_psplus.hybrid.server.table_server import Folders, TableServer
from keras_psplus.hybrid.servers import ControlLink, Servers
from keras_psplus.hybrid.tables.dynamic import DynamicTable
from keras_psplus.hybrid.tables.table import Table, pull, push
from keras_psplus.tables import keys
from keras_psplus.tables.row_optimizer import config_of
from tests.hybrid import stranger

SECRET, AGREED = Secret("token"), "agreed"
# One of this machine's addresses, but not the one that most programs take.
HOST = "127.0.0.2"
SPEC = {"key": 0, "name": "users/embeddings", "rows": 9, "dim": 3, "initializer": None}
LONG = tf.int64
# A worker that has not greeted yet.
NEW = {"worker": "worker-1", "process": "its own"}


def make_server():
    """A server of a cluster with one worker."""
    worker, ps = free_ports(2)
    cluster = {"worker": (f"127.0.0.1:{worker}",), "ps": (f"{HOST}:{ps}",)}
    options = {
        "server": 0,
        "servers": 1,
        "pull_compressor": None,
        "push_compressor": None,
        "sync": True,
    }
    return TableServer(
        TaskConfig(cluster, "ps", 0),
        SECRET,
        options,
        AGREED,
        lambda line: None,
        [tempfile.gettempdir()],
    )


@contextlib.contextmanager
def serving():
    """A server in a thread of this process; and the thread."""
    server = make_server()
    ended = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ended,))
    thread.start()
    assert server.listens.wait(30)
    try:
        yield server, thread
    finally:
        ended.set()
        thread.join(10)


@pytest.fixture(scope="module")
def server():
    with serving() as (server, _):
        yield server


@pytest.fixture(scope="module")
def task(server):
    return TaskConfig(server._task.cluster, "worker", 0)


@pytest.fixture(scope="module")
def table(task):
    servers = Servers(task, SECRET, timeout=20, patience=2)
    servers.greet(AGREED, 2, 20)
    servers.make("table", spec=SPEC)
    return Table(servers, 0, SPEC["name"], (9, 3), None, None)


def control(task, secret=SECRET):
    return ControlLink("ps-0", task.cluster["ps"][0], secret, timeout=20)


def test_rows_are_written_read_and_looked_up(table):
    value = np.arange(27, dtype="float32").reshape(9, 3)
    table.write(0, value)
    np.testing.assert_array_equal(table.read(0), value)
    rows = pull(table, tf.constant([8, 2], LONG), replica=0)
    np.testing.assert_array_equal(rows, value[[8, 2]])


def test_it_listens_on_its_own_host_only(task, table):
    host, port = task.cluster["ps"][0].split(":")
    assert host == HOST
    socket.create_connection((HOST, int(port)), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=5)


@pytest.mark.parametrize(
    "request_, message",
    [
        (("table", {"spec": {**SPEC, "rows": 10}}), "is another one.*\\(10, 3\\).*\\(9, 3\\)"),
        (("hello", {**NEW, "agreed": "other", "replicas": 2}), "started with another strategy"),
        (("hello", {**NEW, "agreed": AGREED, "replicas": 3}), "3 replicas"),
        (("format_disk", {}), "no such request.*format_disk"),
        (("optimizer", {"key": 7, "config": {}, "number": 1, "first_slot": 1}), "7"),
    ],
)
def test_wrong_requests_are_refused(task, table, request_, message):
    what, arguments = request_
    with pytest.raises(TableServerError, match=message):
        control(task).request(what, **arguments)


def test_another_job_is_refused(task, table):
    # As soon as it says hello, and not when it has waited for as long as others may take.
    with pytest.raises(ClusterStartupError, match="another job.*`job_token`.*another token"):
        Servers(task, Secret("other"), timeout=20, patience=2).greet(AGREED, 2, 20)
    # One that has made up its own key, of all that it can know.
    servers = Servers(task, Secret("other"), timeout=20, patience=2)
    servers._row_keys[0].set(table.servers._first_processes[0])
    other = Table(servers, 0, SPEC["name"], (9, 3), None, None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="lost: ps-0 .*does not know this job"):
        pull(other, tf.constant([1], LONG), replica=0)


def test_a_stranger_can_do_nothing_with_what_he_finds(task, table, tmp_path):
    table.write(0, np.ones((9, 3), "float32"))
    assert stranger.attack(task.cluster["ps"][0], str(tmp_path / "his")) == 3
    assert not os.listdir(tmp_path) and (table.read(0) == 1).all()


def test_nothing_that_was_overheard_says_anything_anew(task, table, monkeypatch):
    link, sent = control(task), []
    send = link._session._send
    link._session._send = lambda text: sent.append(text) or send(text)
    before = link.request("assignments", key=0, slot=7)["count"]
    link.request("assigned", key=0, slot=7)
    assert all("token" not in text for text in sent)
    for text in list(sent):
        send(text)  # the answer that was given once
        for changed in (text.replace("slot", "tols"), text.replace('proof": "', 'proof": "0')):
            assert "error" in json.loads(send(changed)) or "open" in changed
    assert link.request("assignments", key=0, slot=7)["count"] == before + 1
    # Nor does a server that does not know the token pass for one that does.
    link._session._send = lambda text: send(text).replace("count", "tnuoc")
    with pytest.raises(TableServerError, match="does not know this job's token"):
        link.request("assignments", key=0, slot=7)


def test_requests_do_not_pile_up(server, task, table):
    link = control(task)
    link.request("assignments", key=0, slot=8)
    before = len(server._tickets)
    for _ in range(20):
        link.request("assignments", key=0, slot=8)
    assert len(server._tickets) == before


def test_it_writes_only_where_it_may(task, table, tmp_path):
    (tmp_path / "link").symlink_to("/")
    forbidden = {"/work-of-others": "t", str(tmp_path / "link" / "srv"): "t", str(tmp_path): "../t"}
    for directory, stem in forbidden.items():
        with pytest.raises(TableServerError, match="ps-0 .* writes only below .*`tables_dir=`"):
            control(task).request("begin_save", directory=directory, stem=stem)
    for what in ("check_directory", "keep"):
        with pytest.raises(TableServerError, match="writes only below"):
            control(task).request(what, directory="/work-of-others")
    # In a job with a secret, the chief may name any folder, but not any file.
    everywhere = Folders(None)
    everywhere.check_allowed("/work-of-others", "tables-1")
    with pytest.raises(ValueError, match="writes only below"):
        everywhere.check_allowed("/work-of-others", "../tables-1")


def test_garbage_does_no_harm(task, table):
    before = table.read(0)
    host, port = task.cluster["ps"][0].split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100, b""):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(garbage)
    link = table.servers.new_links()[0]
    for arguments in ([tf.constant([1.5])], [], [tf.constant([99])], [tf.constant([-1])]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="lost: ps-0"):
            link.call(table.method("lookup"), arguments, tf.float32, [None, 3])
    np.testing.assert_array_equal(table.read(0), before)


def test_silent_connections_delay_no_table(task, table):
    host, port = task.cluster["ps"][0].split(":")
    with contextlib.ExitStack() as silent:
        for _ in range(64):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=5))
        began = time.monotonic()
        for key in (50, 51, 52):
            table.servers.make("table", spec={**SPEC, "key": key})
        # Of 20 s for each, in which gRPC's server that ends waits for the answer to a ping.
        assert time.monotonic() - began < 3 * 20
        assert table.read(0).shape == (9, 3)


def test_gradients_of_a_step_are_applied_once_all_are_there(task, table):
    optimizer = tf.keras.optimizers.SGD(1.0)
    config = config_of(optimizer, None, None, None)
    table.servers.make("optimizer", key=0, config=config, number=1, first_slot=1)
    table.optimizers = 1
    table.write(0, np.zeros((9, 3), "float32"))

    def send(rank, step, ids):
        slices = tf.constant(ids, LONG), tf.ones([len(ids), 3])
        header = tf.constant(rank, LONG), tf.constant(step, LONG), tf.constant(step, LONG)
        return int(push(table, slices, 0, header, tf.constant([1.0]))[0])

    assert send(1, 0, [2, 4]) == 0
    # One that comes twice, as the answer to the first was lost, counts once.
    assert send(1, 0, [2, 4]) == 0
    assert not table.read(0).any()
    assert send(0, 0, [4]) == 1
    np.testing.assert_array_equal(table.read(0)[:, 0], [0, 0, -1, 0, -2, 0, 0, 0, 0])
    # A worker without rows takes part as well.
    assert send(0, 1, []) == 1
    assert send(1, 1, [8]) == 2
    assert table.read(0)[8, 0] == -1


def test_an_optimizer_that_is_not_by_rows_is_refused(task, table):
    table.servers.make("table", spec={**SPEC, "key": 1})
    config = config_of(tf.keras.optimizers.Lamb(), None, None, None)
    with pytest.raises(TableServerError, match="cannot be applied to the rows"):
        control(task).request("optimizer", key=1, config=config, number=1, first_slot=1)


def test_a_worker_that_is_started_again_gets_no_tables_of_the_start_before(monkeypatch):
    with serving() as (server, thread):
        task = TaskConfig(server._task.cluster, "worker", 0)
        Servers(task, SECRET, timeout=20, patience=2).greet(AGREED, 2, 20)
        # Another process of the same name, in which pushes are counted from the beginning.
        monkeypatch.setattr(servers_module, "own_id", lambda: "another")
        # It waits for the next server, which does not come here.
        with pytest.raises(ClusterStartupError, match="ps-0 did not come to .* Start it"):
            Servers(task, SECRET, timeout=20, patience=2).greet(AGREED, 2, 2)
        thread.join(10)
        assert not thread.is_alive() and server.restarted == "worker-0"


def test_a_process_in_the_place_of_the_one_that_is_meant_is_refused(task, table):
    link = control(task)
    link.nonce = "that of another process"
    with pytest.raises(TableServerLostError, match="has been started again.*Start the whole job"):
        link.request("begin_save", directory="/", stem="tables")


def test_tables_that_are_not_those_that_were_saved_are_refused(task, table, tmp_path):
    folder = str(tmp_path / "tables")
    (tmp_path / "file").write_text("")
    with pytest.raises(TableServerError, match=r"ps-0 \(.*\): cannot write .*file/tables"):
        saving.save(table.servers, [table], str(tmp_path / "file" / "tables"))
    with pytest.raises(ValueError, match="There are no tables there"):
        saving.load(table.servers, [table], folder)
    saving.save(table.servers, [table], folder)
    saving.save(table.servers, [table], folder)
    assert len([name for name in os.listdir(folder) if name.endswith(".index")]) == 1
    other = Table(table.servers, 0, SPEC["name"], (8, 3), None, None)
    message = r"shape \(8, 3\) is not in .* which has users/embeddings \(9, 3\).*the same model"
    with pytest.raises(ValueError, match=message):
        saving.load(table.servers, [other], folder)
    table.optimizer = tf.keras.optimizers.Adam()
    try:
        saving.load(table.servers, [table], folder)
        listed = read_list(folder)
        pairs = [(table, listed["tables"][0])]
        with pytest.raises(ValueError, match="another optimizer.*Received: None for Adam"):
            saving.request_of(pairs, folder, listed, is_strict=True)
    finally:
        table.optimizer = None


KEYS_SPEC = {"name": "keys", "key": 0, "dim": 2, "kind": "dynamic", "default": "zeros"}
KEYS_SPEC |= {"admit": None, "expire": [], "initializer": keys.check_initializer("uniform")}


def test_methods_are_traced_with_their_group_s_first_call():
    with serving() as (server, _):
        servers = Servers(TaskConfig(server._task.cluster, "worker", 0), SECRET, 20, patience=2)
        servers.greet(AGREED, 1, 20)
        servers.make("table", spec=KEYS_SPEC)
        table = DynamicTable(servers, KEYS_SPEC, None, None)
        found = []
        for act in (
            lambda: table.read(0),
            lambda: table.contents.insert(np.array([5]), [], np.array([1])),
        ):
            found.append({what for _, what in server._checked_methods})
            act()
        assert found[0] == {"lookup", "lookup_training"}
        assert {"entries", "read0", "changed", "removed"} < found[1]
        assert not found[1] & {"insert", "admit", "remove", "put0", "clear"}
        assert table.snapshot().keys.tolist() == [5]


def test_a_server_in_another_s_place_serves_all_methods(monkeypatch):
    server = make_server()
    for what in ("load", "take_up"):
        monkeypatch.setattr(server._files, what, lambda *_, **options: None)
    server._handle(
        "recover",
        greeting={**NEW, "agreed": AGREED, "replicas": 1},
        first_process="the one before",
        made=[("table", {"spec": KEYS_SPEC})],
        assigned=[],
        load={"tables": [], "directory": "", "stems": [""]},
    )
    server._restart()
    served = {what for _, what in server._checked_methods}
    assert served == server._shards[0].methods().keys()


@pytest.mark.parametrize("first", ["check_directory", "optimizer"])
def test_the_first_backup_is_prepared_before_training(first, monkeypatch, tmp_path):
    prepared, server = [], make_server()
    monkeypatch.setattr(DynamicShard, "prepare_capture", lambda shard: prepared.append(asked[-1]))
    config = config_of(tf.keras.optimizers.SGD(1.0), None, None, None)
    requests = {
        "check_directory": {"directory": str(tmp_path)},
        "optimizer": {"key": 0, "config": config, "number": 1, "first_slot": 1},
    }
    asked = ["hello", "table"]
    server._handle("hello", **NEW, agreed=AGREED, replicas=1)
    server._handle("table", spec=KEYS_SPEC)
    for what in sorted(requests, key=lambda what: what != first):
        asked.append(what)
        server._handle(what, **requests[what])
    # Not before the optimizer's slots are known, nor in a job that makes no backups.
    assert prepared == asked[-1:]
