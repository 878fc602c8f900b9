"""A parameter server of `HybridStrategy`: it holds shards of tables until the chief has ended.

TensorFlow's RPC server takes methods only before it starts. When a table is added, a second server
is started on the same port (they may share it) and the first is ended; clients notice nothing but
a call that has to be repeated.
"""

import collections
import json
import math
import os
import posixpath
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.cluster import handshake, serving
from keras_psplus.cluster.channel import Authenticator, ChannelServer, Secret
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.preflight import check_local_address
from keras_psplus.cluster.process import tuning
from keras_psplus.cluster.process.signals import SIGNAL
from keras_psplus.errors import ChiefLostError, TableServerError
from keras_psplus.files import tables as shard_files
from keras_psplus.hybrid import calls
from keras_psplus.hybrid.calls import RowKey, with_key_check
from keras_psplus.hybrid.server.server_files import ServerFiles
from keras_psplus.hybrid.server.shard import DynamicShard, Method, TableShard
from keras_psplus.hybrid.servers import ControlLink, Tickets
from keras_psplus.tables.row_optimizer import check_elementwise

# Folders below which a parameter server writes, for any client.


_STEM = re.compile(r"[\w.-]+")


class Folders:
    """The folders that a server may write below; any if the paths are None."""

    def __init__(self, paths: Iterable[str] | None) -> None:
        self._paths = None if paths is None else list(paths)

    def check_allowed(self, directory: str, stem: str = "none") -> None:
        """Sees that a folder, and files that begin so, are below one of them."""
        wanted, paths = _real(directory), ["/"] if self._paths is None else self._paths
        is_below = self._paths is None or any(
            f"{wanted}/".startswith(f"{_real(path).rstrip('/')}/") for path in paths
        )
        if not is_below or not _STEM.fullmatch(stem):
            raise ValueError(
                f"it writes only below the folder that it was started for: {', '.join(paths)}. "
                "Give all tasks `tables_dir=`, the folder below which backups and `save_tables` "
                f"are to be written, or a secret {TOKEN_VARIABLE}. "
                f"Received: directory={directory!r}"
            )


def _real(path: str) -> str:
    if "://" not in path:
        return os.path.realpath(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{posixpath.normpath(rest)}"


_POLL_SECONDS, _PENDING_SECONDS = 0.1, 0.01
# For a worker to fetch the answer that this server ends.
_LAST_ANSWER_SECONDS = 1.0
# Of one address, as gRPC reads it.
_SPELLINGS = "", "dns:///", "dns:"


class TableServer:
    """Serves this task's shards.

    `options` is what `TableShard` takes beside its table; the text `agreed` has to be equal in all
    processes of the job.
    """

    def __init__(
        self,
        task: TaskConfig,
        secret: Secret,
        options: dict[str, Any],
        agreed: str,
        log: Callable[[str], None],
        folders: Iterable[str] | None = (),
    ) -> None:
        assert task.address is not None
        self._task, self._options, self._agreed = task, options, agreed
        self._address = task.address
        self._log, self._folders = log, Folders(folders)
        self._gate = Authenticator(
            secret,
            f"{task.name} belongs to another job: its token differs. Start all tasks with the same "
            f"TF_CONFIG cluster, and the same {TOKEN_VARIABLE} or `job_token`. Received: another "
            "token",
        )
        self._row_key = RowKey(secret)
        self._checked_methods: dict[tuple[int, str], tuple[Any, Any]] = {}
        # Its own, or that of the process whose place it has taken.
        self._first_process = self.nonce
        self._row_key.set(self._first_process)
        self._shards: dict[int, TableShard] = {}
        self._files = ServerFiles(self._shards, options)
        self._assignments: collections.Counter[tuple[int, int]] = collections.Counter()
        self._requests: queue.SimpleQueue[tuple[str, int, dict[str, Any]]] = queue.SimpleQueue()
        self._tickets = Tickets()
        self._server = None
        self._generation = self._served = self._starts = 0
        self.was_greeted = self.was_left = False
        # Processes of this start of the job by workers' names; the worker that has started again.
        self._processes: dict[str, str] = {}
        self.restarted: str | None = None
        self._ends_at = math.inf
        self.listens = threading.Event()

    def serve(self, ended: threading.Event) -> None:
        """Answers until the event `ended` is set, or a worker has been started again."""
        channel = self._listen()
        try:
            self._restart()
            self.listens.set()
            self._log(f"{self._task.name} serves tables on {self._task.address}")
            self._answer_until(ended)
        finally:
            channel.close()

    def _answer_until(self, ended: threading.Event) -> None:
        while not ended.is_set() and time.monotonic() < self._ends_at:
            if self.was_greeted:
                # The chief, which asks for it, saves the job first.
                SIGNAL.watch()
            try:
                client, number, request = self._requests.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            try:
                answer = self._handle(**request)
            except Exception as error:  # Sent to the client that has asked.
                answer = {"error": f"{error}"}
            if answer is None:
                # It takes its time; others have their answers meanwhile.
                self._requests.put((client, number, request))
                time.sleep(_PENDING_SECONDS)
                continue
            if self._served < self._generation:
                # Before the answer, by which the new methods can be called.
                self._restart()
            self._tickets.put(client, number, answer)

    @property
    def nonce(self) -> str:
        return self._gate.process

    def _listen(self) -> ChannelServer:
        def handle(text: str, _: str) -> str:
            try:
                return json.dumps(self._ask(json.loads(text)))
            except (ValueError, KeyError, TypeError) as error:
                return json.dumps({"error": f"This is no request. Received: {error}"})

        host = self._address.rpartition(":")[0]
        return serving.listen(self._task, self._gate, handle, host)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Notes a request, for the main thread to answer them one by one.

        The channel's threads call this, of which there are few: none of them may wait here.
        """
        client, number, read = request.pop("ticket")
        if self._tickets.take(client, number, read):
            self._requests.put((client, number, request))
        answer = self._tickets.answer(client, number)
        return {"pending": True, "progress": self._files.progress} if answer is None else answer

    def _handle(self, what: str, **arguments: Any) -> dict[str, Any] | None:
        handler = getattr(self, f"_on_{what}", None)
        if handler is None:
            raise ValueError(f"There is no such request. Received: {what!r}")
        if "directory" in arguments and what != "load":
            self._folders.check_allowed(arguments["directory"], arguments.get("stem", "none"))
        return handler(**arguments)

    def _on_hello(self, agreed: str, replicas: int, worker: str, process: str) -> dict[str, Any]:
        if self._processes.setdefault(worker, process) != process:
            # Its pushes would be taken for those that the process before has sent already.
            self.restarted, self._ends_at = worker, time.monotonic() + _LAST_ANSWER_SECONDS
            return {"is_of_earlier_start": True}
        known = self._options.setdefault("replicas", replicas)
        if agreed != self._agreed or replicas != known:
            raise ValueError(
                f"{self._task.name} was started with another strategy: all must run the same "
                f"script. Received: {agreed} with {replicas} replicas, for {self._agreed} with "
                f"{known} on {self._task.name}"
            )
        self.was_greeted = True
        return {"nonce": self.nonce, "first_process": self._first_process}

    def _on_who(self) -> dict[str, Any]:
        return {"nonce": self.nonce, "is_told_to_end": SIGNAL.is_noted}

    def _on_shutdown(self) -> dict[str, Any]:
        self.was_left = True
        return {}

    def _on_table(self, spec: dict[str, Any]) -> dict[str, Any]:
        key = spec["key"]
        shard = self._shards.get(key)
        if shard is None:
            kind = DynamicShard if spec.get("kind") == "dynamic" else TableShard
            self._shards[key] = kind(spec, **self._options)
            self._generation += 1
        elif shard.spec != spec:
            raise ValueError(
                f"Table {key} of {self._task.name} is another one. "
                f"Received: {_described(spec)} for {_described(shard.spec)}"
            )
        return {}

    def _on_optimizer(
        self, key: int, config: dict[str, Any], number: int, first_slot: int
    ) -> dict[str, Any]:
        shard = self._shards[key]
        self._files.settle()
        check_elementwise(config, shard.spec["dim"])
        shard.set_optimizer(config, number, first_slot)
        self._files.prepare()
        self._generation += 1
        return {}

    def _on_serve(self, key: int, group: str) -> dict[str, Any]:
        groups = self._shards[key].groups
        if group not in groups:
            groups.add(group)
            self._generation += 1
        return {}

    def _on_assigned(self, key: int, slot: int) -> dict[str, Any]:
        self._assignments[key, slot] += 1
        return {}

    def _on_assignments(self, key: int, slot: int) -> dict[str, Any]:
        return {"count": self._assignments[key, slot]}

    def _on_pushes(self) -> dict[str, Any]:
        return {"pushes": [shard.pushes() for shard in self._shards.values()]}

    def _on_check_directory(self, directory: str) -> dict[str, Any]:
        shard_files.check_writable(directory, self._task.name)
        self._files.saves_in_training = True
        self._files.prepare()
        return {}

    def _on_begin_save(self, directory: str, stem: str, follows: list[str]) -> dict[str, Any]:
        self._files.begin_save(directory, stem, follows)
        return {}

    def _on_end_save(self) -> dict[str, Any] | None:
        return None if self._files.is_writing else self._files.end_save()

    def _on_settle(self) -> dict[str, Any]:
        self._files.settle()
        return {}

    def _on_load(self, **where: Any) -> dict[str, Any]:
        self._files.load(**where)
        return {}

    def _on_keep(self, directory: str, stems: list[str]) -> dict[str, Any]:
        self._files.keep(directory, stems)
        return {}

    def _on_recover(
        self,
        greeting: dict[str, Any],
        first_process: str,
        made: list[tuple[str, dict[str, Any]]],
        assigned: list[tuple[int, int, int]],
        load: dict[str, Any],
    ) -> dict[str, Any]:
        if self._shards:
            raise ValueError(f"It has tables already. Received: a request to recover {load}")
        try:
            self._on_hello(**greeting)
            self._first_process = first_process
            self._row_key.set(first_process)
            self._files.saves_in_training = True
            for what, arguments in made:
                self._handle(what, **arguments)
            for shard in self._shards.values():
                shard.groups.update(calls.GROUPS)  # Workers have asked the process before.
            self._files.load(**load)
            tables = [(key, stored) for key, stored, _ in load["tables"]]
            self._files.take_up(load["directory"], load["stems"][-1], tables)
        except Exception:
            # Nobody must reach half of it.
            self._shards.clear()
            self._generation = self._served
            raise
        self._assignments.update({(key, slot): count for key, slot, count in assigned})
        self._log(f"{self._task.name} has read its rows of the tables in {load['directory']}")
        return {}

    def _on_lost(self) -> dict[str, Any]:
        counts = {shard.name: shard.missing_updates.counted() for shard in self._shards.values()}
        return {"lost": counts}

    def _restart(self) -> None:
        generation = self._generation
        methods = {}
        for key, shard in self._shards.items():
            for what, function in shard.methods().items():
                if calls.group_of(what) in shard.groups:
                    method = self._with_key_check(key, what, function)
                    methods[calls.method(key, what)] = method
        # TensorFlow takes a second server of the same text for the first, until that is gone.
        self._starts += 1
        address = _SPELLINGS[self._starts % len(_SPELLINGS)] + self._address
        server = tf.distribute.experimental.rpc.Server.create("grpc", address)
        for name, function in methods.items():
            server.register(name, function)  # Traces it.
            self._files.note_progress()
        server.start()
        # A server ends with its last reference, which must be that thread's: it waits for calls
        # that may be waiting for this one, and 20 s for a connection that does not answer.
        old, self._server, self._served = [self._server], server, generation
        threading.Thread(target=old.clear, daemon=True).start()

    def _with_key_check(self, key: int, what: str, function: Method) -> Method:
        of, method = self._checked_methods.get((key, what), (None, None))
        if of is not function:
            method = with_key_check(function, self._row_key)
            self._checked_methods[key, what] = function, method
        return method


def _described(spec: dict[str, Any]) -> str:
    return f"'{spec['name']}' of shape ({spec.get('rows', 'any')}, {spec['dim']})"


# The life of a parameter server of `HybridStrategy`: as long as its job's chief.


_ANSWER_SECONDS = 20.0


def serve(
    task: TaskConfig,
    secret: Secret,
    options: dict[str, Any],
    agreed: str,
    startup_timeout: float,
    folders: Iterable[str] | None = (),
    chief_gone: float = 5.0,
) -> None:
    """Serves tables until the chief has ended.

    It counts as ended when it cannot be reached for `chief_gone` seconds. ChiefLostError is raised
    if it did not say so, or a worker has been started again.
    """
    check_local_address(task)
    tuning.tune()
    tuning.hide_gpus()
    ended, problem = threading.Event(), []
    server = TableServer(task, secret, options, agreed, serving.log_line, folders)

    def watch() -> None:
        try:
            _check_that_it_answers(server, task, secret)
            serving.outlive(
                task,
                lambda: server.was_greeted,
                lambda: server.was_greeted and not server.was_left,
                lambda: False,  # Other workers may not have ended.
                startup_timeout,
                chief_gone,
            )
        except Exception as error:  # Raised again by the main thread.
            problem.append(error)
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    server.serve(ended)
    if problem:
        raise problem[0]
    if server.restarted is not None:
        raise ChiefLostError(
            f"{server.restarted} has been started again, and {task.name} holds tables of the start "
            "before: it ends. Start it again, too; with the BackupAndRestore callback "
            f"training resumes where it was. Received: another process of {server.restarted}"
        )


def _check_that_it_answers(server: TableServer, task: TaskConfig, secret: Secret) -> None:
    """TensorFlow's server says nothing if it cannot listen, or if somebody else does there."""
    server.listens.wait()
    assert task.address is not None
    link = ControlLink(task.name, task.address, secret, timeout=_ANSWER_SECONDS)
    try:
        nonce, said = link.request("who")["nonce"], ""
        if not handshake.grpc_responds(task.address, _ANSWER_SECONDS):
            nonce = None
    except TableServerError as error:
        nonce, said = None, f" ({error})"
    if nonce != server.nonce:
        raise ClusterStartupError(
            f"{task.name} cannot be reached at {task.address}, its own address: another process "
            "uses the port, or the host's name leads elsewhere. "
            f"Received: TF_CONFIG={task.to_tf_config()}{said}"
        )
