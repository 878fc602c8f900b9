"""Starts hundreds of stub tasks that find each other, and says how long it takes.

    python benchmarks/scale_start.py --tasks 16 64 256

A stub task is a process that calls `wait_for_cluster`, with which every task of a cluster starts,
on an address of its own on this machine; TensorFlow is not started in it. Stubs are forked from one
process which has imported the package, so what is measured is our own start, of all tasks together
on this machine's cores: in a real cluster each has its own.
"""

import argparse
import collections
import gc
import json
import os
import resource
import sys
import time

from keras_psplus.cluster import handshake
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.preflight import wait_for_cluster


def stub(cluster, index, all_wait, pipe):
    """One task: waits for all others; writes what it took to a pipe."""
    calls, dial = collections.Counter(), handshake.dial

    def counting(*args):
        calls["dials"] += 1
        return dial(*args)

    handshake.dial = counting
    before = resource.getrusage(resource.RUSAGE_SELF)
    config, error = TaskConfig(cluster, "worker", index), None
    try:
        wait_for_cluster(config, timeout=120, all_wait=all_wait, log=lambda line: None)
    except Exception as failed:
        error = str(failed)[:300]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
    line = {"dials": calls["dials"], "seconds": seconds, "error": error, "end": time.monotonic()}
    os.write(pipe, json.dumps(line).encode() + b"\n")


def start(tasks, all_wait):
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
                stub(cluster, index, all_wait, writer)
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
    return {
        "tasks": tasks,
        "calls": "some" if all_wait else "each other",
        "forked": round(forked, 2),
        "seconds": round(max(result["end"] for result in results) - began, 2),
        "dials": sum(result["dials"] for result in results),
        "most_dials": max(result["dials"] for result in results),
        "cpu": round(sum(result["seconds"] for result in results), 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--mesh", action="store_true", help="also as before: each calls each other")
    args = parser.parse_args()
    print("| stub tasks | calls | s | of which forking | dials | of one task | processor s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for tasks in args.tasks:
        for all_wait in [True, False] if args.mesh else [True]:
            r = start(tasks, all_wait)
            print(
                f"| {tasks} | {r['calls']} | {r['seconds']} | {r['forked']} | {r['dials']} "
                f"| at most {r['most_dials']} | {r['cpu']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
