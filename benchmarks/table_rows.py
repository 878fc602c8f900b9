"""Rows per second of one core of a parameter server of `HybridStrategy`, beside local operations.

    python benchmarks/table_rows.py

A table server on a core of its own, in a process of its own, is asked for rows and sent gradients
of rows, to which it applies Adam. This process, on another core, asks, and does the same on a table
of its own, in turns: `tf.gather`, and the gathers, Adam and scatters by hand. Beside what the clock
says stand rows per second of the server's processor time, which does not count what this process
does with the answers.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import statistics
import threading
import time

TOKEN, AGREED = "token", "agreed"


def serve(cluster, core, sync):
    """The process with the server."""
    _stay_on(core)
    from keras_psplus.cluster.channel import Secret
    from keras_psplus.cluster.config import TaskConfig
    from keras_psplus.hybrid.server.table_server import TableServer

    options = {
        "server": 0,
        "servers": 1,
        "pull_compressor": None,
        "push_compressor": None,
        "sync": sync,
    }
    server = TableServer(TaskConfig(cluster, "ps", 0), Secret(TOKEN), options, AGREED, print)
    server.serve(threading.Event())


def _stay_on(core):
    os.sched_setaffinity(0, [core])
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        TF_CPP_MIN_LOG_LEVEL="2",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="2",  # With one, an answer would wait for the next question.
    )


class Remote:
    """A table on a server, with Adam.

    Args:
        args: The command line's.
        core: The server's.
        sync: The server's `sync`.
    """

    def __init__(self, args, core, sync):
        from keras_psplus.cluster.config import TaskConfig
        from keras_psplus.cluster.ports import free_ports

        worker, ps = (f"127.0.0.1:{port}" for port in free_ports(2))
        self._cluster = {"worker": (worker,), "ps": (ps,)}
        self._args, self._step = args, 0
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(self._cluster, core, sync), daemon=True
        )
        self._task = TaskConfig(self._cluster, "worker", 0)

    def __enter__(self):
        import keras
        import tensorflow as tf

        from keras_psplus.cluster.channel import Secret
        from keras_psplus.hybrid.servers import Servers
        from keras_psplus.hybrid.tables import table as table_module
        from keras_psplus.tables.row_optimizer import config_of

        self._process.start()
        servers = Servers(self._task, Secret(TOKEN), timeout=60, patience=5)
        servers.greet(AGREED, 1, 120)
        shape = self._args.table_size, self._args.dim
        spec = {"key": 0, "name": "rows", "rows": shape[0], "dim": shape[1], "initializer": None}
        servers.make("table", spec=spec)
        config = config_of(keras.optimizers.Adam(), None, None, None)
        servers.make("optimizer", key=0, config=config, number=1, first_slot=1)
        table = table_module.Table(servers, 0, "rows", shape, None, None)
        table.optimizers = 1
        most, zero = self._args.ids, tf.constant(0, tf.int64)

        replicas = range(self._args.in_flight)

        @tf.function
        def lookup(ids):
            # Replicas of a worker have links of their own.
            return [table_module.pull(table, ids, replica, most) for replica in replicas]

        @tf.function
        def update(ids, gradient, step):
            header, numbers = (zero, step, step), tf.constant([0.001])
            return table_module.push(table, (ids, gradient), 0, header, numbers, most)

        def push(ids, gradient):
            update(ids, gradient, tf.constant(self._step, tf.int64))
            self._step += 1

        self.lookup, self.update = lambda ids, _: lookup(ids), push
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.join()

    def seconds(self):
        """Processor time of the server."""
        stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2]
        return sum(map(int, stat.split()[11:13])) / os.sysconf("SC_CLK_TCK")


class Local:
    """The same in this process, by hand."""

    seconds = staticmethod(time.process_time)

    def __init__(self, args):
        import tensorflow as tf

        shape = args.table_size, args.dim
        table, momentum, velocity = (tf.Variable(tf.zeros(shape)) for _ in range(3))

        @tf.function
        def lookup(ids):
            return [tf.gather(table, ids)]

        @tf.function
        def update(ids, g):
            m = 0.9 * tf.gather(momentum, ids) + 0.1 * g
            v = 0.999 * tf.gather(velocity, ids) + 0.001 * g * g
            rows = tf.gather(table, ids) - 0.001 * m / (tf.sqrt(v) + 1e-7)
            for variable, value in ((table, rows), (momentum, m), (velocity, v)):
                variable.scatter_update(tf.IndexedSlices(value, ids))

        self.lookup, self.update = lambda ids, _: lookup(ids), update


def rates(table, call, args, inputs):
    """Rows per second of the clock's time, and of processor time."""
    for ids, gradient in inputs[:2]:
        call(ids, gradient)
    processor, began, calls = table.seconds(), time.perf_counter(), 0
    while time.perf_counter() < began + args.seconds:
        for ids, gradient in inputs:
            # Without an answer, a call has ended when it returns.
            answers = call(ids, gradient) or [None]
            for answer in answers:
                if answer is not None:
                    answer.numpy()
            calls += len(answers)
    took, processor = time.perf_counter() - began, table.seconds() - processor
    return calls * args.ids / took, calls * args.ids / processor


def measure(args):
    """By place and call: lists of the two rates over the turns."""
    cores = sorted(os.sched_getaffinity(0))
    _stay_on(cores[-1])
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    inputs = [
        (
            tf.constant(rng.choice(args.table_size, args.ids, replace=False), tf.int64),
            tf.constant(rng.normal(size=(args.ids, args.dim)), tf.float32),
        )
        for _ in range(8)
    ]
    results = {}
    with contextlib.ExitStack() as stack:
        tables = {"local": Local(args)}
        for name, sync in (("server", True), ("server, sync=False", False)):
            tables[name] = stack.enter_context(Remote(args, cores[0], sync))
        for _ in range(args.turns):
            for name, table in tables.items():
                for what, call in (("lookup", table.lookup), ("update", table.update)):
                    found = rates(table, call, args, inputs)
                    results.setdefault((what, name), []).append(found)
    return results


def table_of(results):
    """A Markdown table of medians."""
    lines = [
        "| | where | million rows/s | of local | of processor time | of local |",
        "|---" * 6 + "|",
    ]
    medians = {key: [statistics.median(r) for r in zip(*turns)] for key, turns in results.items()}
    for (what, name), found in sorted(medians.items()):
        cells = []
        for rate, local in zip(found, medians[what, "local"]):
            cells += [f"{rate / 1e6:.2f}", f"{rate / local:.2f}"]
        lines.append(f"| {what} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table_size", type=int, default=200_000, help="rows")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--ids", type=int, default=10_000, help="distinct ones in each call")
    parser.add_argument(
        "--in_flight", type=int, default=1, help="lookups that are under way at once"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3, help="for each figure of a turn")
    parser.add_argument("--out", type=pathlib.Path, help="where to write everything as JSON")
    args = parser.parse_args()
    results = measure(args)
    if args.out:
        named = [{"what": w, "where": n, "rates": r} for (w, n), r in results.items()]
        args.out.write_text(json.dumps({"load": os.getloadavg()[0], "results": named}, indent=1))
    print(table_of(results))


if __name__ == "__main__":
    main()
