"""Costs of start-up, exchanges and heartbeats among hundreds of stub tasks.

    python benchmarks/scale.py --tasks 16 64 256
    python benchmarks/scale.py --tasks 16 64 --all      # beside it: each task asks each other

Stub tasks run the package's own code, and no TensorFlow. At start they are processes, forked from
one that has imported the package, which call `wait_for_cluster` on addresses of their own on this
machine. For an exchange of the control plane they are threads, on a key-value store in this process
in place of that of TensorFlow's coordination service; what is counted is the calls that reach it.
All share this machine's cores, where in a cluster each task has its own.
"""

import argparse
import collections
import concurrent.futures
import gc
import json
import os
import resource
import sys
import threading
import time
import types

from keras_psplus.all_reduce.liveness import HeartbeatWatch
from keras_psplus.cluster import handshake, preflight
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.preflight import wait_for_cluster
from keras_psplus.core.jobs import control as control_module
from keras_psplus.core.jobs.control import ControlPlane

HEARTBEAT_TIMEOUT = 20.0
EXCHANGES = 5


def stub(cluster, index, pipe):
    """One task: waits for all others; writes what it took to a pipe."""
    calls, dial = collections.Counter(), handshake.dial

    def counting(*args):
        calls["dials"] += 1
        return dial(*args)

    handshake.dial = counting
    before = resource.getrusage(resource.RUSAGE_SELF)
    config, error = TaskConfig(cluster, "worker", index), None
    try:
        wait_for_cluster(config, timeout=120, all_wait=True, log=lambda line: None)
    except Exception as failed:
        error = str(failed)[:300]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
    line = {"dials": calls["dials"], "seconds": seconds, "error": error, "end": time.monotonic()}
    os.write(pipe, json.dumps(line).encode() + b"\n")


def start(tasks):
    """Starts all stubs; returns what it took."""
    cluster = {"worker": tuple(f"127.0.0.1:{port}" for port in free_ports(tasks))}
    reader, writer = os.pipe()
    gc.collect()
    gc.freeze()
    began, children = time.monotonic(), []
    for index in range(tasks):
        child = os.fork()
        if not child:
            code = 1
            try:
                stub(cluster, index, writer)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    forked = time.monotonic() - began
    os.close(writer)
    with os.fdopen(reader) as lines:
        results = [json.loads(line) for line in lines]
    for child in children:
        os.waitpid(child, 0)
    errors = [result["error"] for result in results if result["error"]]
    if errors or len(results) < tasks:
        sys.exit(f"{len(errors)} of {tasks} stubs failed: {errors[:1]}")
    seconds = max(result["end"] for result in results) - began
    dials = sum(result["dials"] for result in results)
    processor = sum(result["seconds"] for result in results)
    return f"{seconds:.1f} | {forked:.1f} | {dials:,} | {processor:.1f}"


class Store:
    """A key-value store as that of the coordination service, which counts its calls."""

    def __init__(self):
        self.values, self.calls, self.most, self._changed = {}, 0, 0, threading.Condition()

    def set_config_key_value(self, key, value):
        with self._changed:
            self.calls += 1
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self._changed.notify_all()

    def get_config_key_value(self, key, timeout_in_ms):
        with self._changed:
            self.calls += 1
            self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000)
            return self.values[key]

    def delete_config_key_value(self, key):
        with self._changed:
            self.calls += 1
            del self.values[key]


def exchange(tasks):
    """Exchanges texts between all stubs; returns the store's calls and keys."""
    store = Store()
    control_module.context = types.SimpleNamespace(context=lambda: store)
    cluster = {"worker": tuple(f"h:{i + 1}" for i in range(tasks))}

    def run(index):
        plane = ControlPlane(TaskConfig(cluster, "worker", index), 300.0, None, lambda: [])
        for i in range(EXCHANGES):
            plane.exchange("epoch end", str(i))

    with concurrent.futures.ThreadPoolExecutor(tasks) as pool:
        list(pool.map(run, range(tasks)))
    return f"{store.calls // EXCHANGES:,} | {store.most} | {len(store.values)}"


def heartbeats(tasks):
    """Heartbeats of a stub: peers it asks, and the total rate at most."""
    cluster = {"worker": tuple(f"h:{i + 1}" for i in range(tasks))}
    watch = HeartbeatWatch(TaskConfig(cluster, "worker", 1), HEARTBEAT_TIMEOUT)
    asked = len(watch._addresses)
    return f"{asked} | {asked * tasks / (watch._answer / 4):,.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--all", action="store_true", help="also: each task asks each other")
    args = parser.parse_args()
    print(
        "| stub tasks | ask | start: s | of which forking | calls | processor s "
        "| exchange: calls of the store | most keys | keys left "
        "| heartbeats: asked by one | by all in a second |"
    )
    print("|---:|---|" + "---:|" * 9, flush=True)
    some = preflight.EVERYBODY
    for tasks in args.tasks:
        for everybody in [some, sys.maxsize] if args.all else [some]:
            preflight.EVERYBODY = everybody
            asks = "some" if preflight.is_large(tasks) else "each other"
            cells = [start(tasks), exchange(tasks), heartbeats(tasks)]
            print(f"| {tasks} | {asks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
