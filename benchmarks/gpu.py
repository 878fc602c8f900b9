"""Checks and figures of one GPU.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --cpu          # logical CPU devices stand for GPUs

Each check is a job of its own, with a time limit. Those that are timed run one after the other, the
rest `--jobs` at a time. One GPU shows kernels, placement and figures; it cannot show NCCL between
GPUs, nor hosts: two replicas of one GPU use TensorFlow's ring.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time

from keras_psplus.cluster.testing import run_in_processes

TASK = pathlib.Path(__file__).with_name("gpu_task.py")
MIRRORED, PIPELINE = "MultiWorkerMirroredStrategy", "PipelineStrategy"
SERVERS, HYBRID = "ParameterServerStrategy", "HybridStrategy"
ALONE = {"workers": 1}
# Of `keras-psplus`, whose output is kept.
DOCTOR, LAUNCHER = ("doctor",), ("run", "--workers", "2")


def checks():
    """By name: tasks of the job, arguments of `gpu_task.py`, whether it is timed."""
    found = {}

    def add(name, tasks=None, check="fit", strategy=None, given=None, is_timed=False, **flags):
        arguments = [check] + [f"--{key}={value}" for key, value in flags.items()]
        if strategy:
            arguments += [f"--strategy={strategy}", f"--arguments={json.dumps(given or {})}"]
        found[name] = tasks or ALONE, arguments, is_timed

    for model, width in (("dense", 1024), ("transformer", 512)):
        for jit in ("auto", "no", "yes"):
            flags = {"model": model, "width": width, "jit": jit}
            add(f"{model} alone, jit {jit}", is_timed=True, **flags)
            add(f"{model} strategy, jit {jit}", is_timed=True, strategy=MIRRORED, **flags)
        for jit in ("no", "yes"):
            flags = {"model": model, "width": width, "jit": jit, "logical": 2}
            add(f"{model} two logical, jit {jit}", is_timed=True, strategy=MIRRORED, **flags)
    add("compressors", is_timed=True, check="compressors", width=100_000_000)
    for policy in ("mixed_float16", "mixed_bfloat16"):
        add(policy, strategy=MIRRORED, policy=policy, logical=2)
    for name in ("bf16", "int8", "topk:0.01", "powersgd:4", "sign"):
        given = {"compression": name}
        add(f"two logical, {name}", strategy=MIRRORED, given=given, logical=2)
    add("two logical, sums", check="sums", strategy=MIRRORED, logical=2)
    add("two logical, table", strategy=MIRRORED, model="table", width=64, logical=2)
    two = {"workers": 2}
    add("two processes", two, strategy=MIRRORED)
    add("two processes, sums", two, "sums", MIRRORED)
    add("two processes, bf16", two, strategy=MIRRORED, given={"compression": "bf16"})
    add("pipeline, 1f1b", strategy=PIPELINE, given={"microbatches": 4}, logical=2)
    given = {"microbatches": 4, "schedule": "pipedream"}
    add("pipeline, pipedream", strategy=PIPELINE, given=given, logical=2)
    given = {"microbatches": 4}
    add("pipeline, jit", strategy=PIPELINE, given=given, logical=2, jit="yes")
    servers = {"workers": 1, "ps": 1, "chief": True}
    add("servers, sync", servers, strategy=SERVERS, given={"mode": "sync"})
    add("servers, int8", servers, strategy=SERVERS, given={"compression": "int8"})
    given = {"placement": "parameter_server", "row_compression": "int8"}
    tasks = {"workers": 1, "ps": 1}
    add("hybrid, int8", tasks, strategy=HYBRID, given=given, model="table", width=64)
    dynamic = {"model": "dynamic", "width": 64}
    add("dynamic table, alone", **dynamic)
    add("dynamic table, hybrid", tasks, strategy=HYBRID, **dynamic)
    add("dynamic table, servers", servers, strategy=SERVERS, given={"mode": "sync"}, **dynamic)
    for rule in ("accumulate:2", "local_sgd:4", "diloco:4"):
        add(f"two logical, {rule}", strategy=MIRRORED, given={"updates": rule}, logical=2)
    # Memory of a GPU: weights of which, with Adam, activations are a small part.
    adam = {"optimizer": "adam", "width": 4096, "steps": 6}
    add("adam alone", **adam)
    add("adam, two processes", two, strategy=MIRRORED, **adam)
    for share in ("optimizer", "all"):
        given = {"shard": share}
        add(f"adam, two processes, shard {share}", two, strategy=MIRRORED, given=given, **adam)
    cuts = {".*/dense/kernel": [None, "model"], ".*/dense/bias": ["model"]}
    cuts[".*/dense_1/kernel"] = ["model", None]
    add("adam, model parallel", two, strategy="ModelParallelStrategy", given=cuts, **adam)
    add("nccl of one", check="nccl")
    found["keras-psplus doctor"] = DOCTOR, [], False
    add("keras-psplus run", LAUNCHER, strategy=MIRRORED)
    return found


def run(tasks, arguments, cpu, limit):
    """Result of one job, or the end of its logs."""
    env = {"CUDA_CACHE_MAXSIZE": str(1 << 32)}
    if cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
        arguments = [*arguments, "--cpu"]
    start = time.monotonic()
    try:
        if tasks == ALONE:
            logs = {"": _output([TASK, *arguments], env, limit)}
        elif isinstance(tasks, tuple):
            task = [] if tasks == DOCTOR else [TASK, *arguments]
            logs = {"": _output(["-m", "keras_psplus", *tasks, *task], env, limit)}
        else:
            logs = run_in_processes(TASK, **tasks, env=env, args=arguments, timeout=limit).logs
    except (AssertionError, subprocess.SubprocessError) as error:
        return {"error": str(getattr(error, "output", None) or error)[-3000:]}
    lines = [line for text in logs.values() for line in text.splitlines()]
    # The launcher puts the task's name before a line.
    found = [json.loads(line.split("RESULT ", 1)[1]) for line in lines if "RESULT {" in line]
    if not found and tasks != DOCTOR:
        return {"error": "\n".join(lines)}
    output = {"output": lines} if isinstance(tasks, tuple) else {}
    return {**(found[0] if found else {}), **output, "seconds": round(time.monotonic() - start, 1)}


def _output(arguments, env, limit):
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        text=True,
        timeout=limit,
        check=True,
    )
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="logical CPU devices stand for GPUs")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--only", default="", help="parts of checks' names, by commas")
    parser.add_argument("--jobs", type=int, default=2, help="checks at a time that are not timed")
    parser.add_argument("--limit", type=float, default=150, help="seconds for each check")
    options = parser.parse_args()
    wanted = {
        name: check
        for name, check in checks().items()
        if any(part in name for part in options.only.split(","))
        and not (options.cpu and name == "nccl of one")
    }
    results = {}

    def one(name):
        tasks, arguments, _ = wanted[name]
        results[name] = run(tasks, arguments, options.cpu, options.limit)
        print(f"{name:34} {_line(results[name])}", flush=True)
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(results, indent=1))

    for name, (*_, is_timed) in wanted.items():
        if is_timed:
            one(name)
    rest = [name for name, (*_, is_timed) in wanted.items() if not is_timed]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(one, rest))
    return any("error" in result or result.get("good") is False for result in results.values())


def _line(result):
    if "error" in result:
        return "FAILED  " + " | ".join(result["error"].strip().splitlines()[-2:])[-300:]
    shown = ("ms", "device", "jit", "peak", "good", "right")
    shown = {key: result[key] for key in shown if key in result}
    losses = [round(loss, 5) for loss in result.get("losses", [])]
    return f"{json.dumps(shown)} {losses or ''} {result['seconds']} s"


if __name__ == "__main__":
    sys.exit(main())
