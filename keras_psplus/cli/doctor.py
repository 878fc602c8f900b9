"""`keras-psplus doctor`: what this machine has, how TF_CONFIG is understood, and what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras_psplus
from keras_psplus import versions
from keras_psplus.cli import flags, host_doctor
from keras_psplus.cli.flags import Parser, UsageError
from keras_psplus.cluster.config import ClusterConfigError, ClusterStartupError, TaskConfig
from keras_psplus.cluster.console import NoiseFilter
from keras_psplus.cluster.discovery import find
from keras_psplus.cluster.discovery.find import find_ranks, find_task_config
from keras_psplus.cluster.environment import available_cores
from keras_psplus.cluster.preflight import check_local_address, probe_peers
from keras_psplus.log import logger

if TYPE_CHECKING:
    from keras_psplus.keras_hooks.hook import Hook


_USAGE = """
usage: keras-psplus doctor [flags]

Shows versions, devices, cores and memory, the cluster as TF_CONFIG or a launcher's variables
describe it, whether this task's port is free and every other task can be reached, and what Slurm's
and Kubernetes's variables say. With --kernels, compiles the library's C++ kernels if this machine
has not done so; otherwise the first step that needs them does.
With --hooks, shows which functions of Keras the library replaces, and whether those of this Keras
fit. With --links, started in each task of a cluster at once, measures the links between workers,
and shows which groups they make (with --json, what `keras-psplus plan --links` reads). With
--hosts, checks what `keras-psplus run --hosts` needs there, from this machine: ssh, Python,
versions, ports both ways, clocks, bandwidth. Exits with 1 if something is wrong.

  keras-psplus doctor --hosts 10.0.0.1,10.0.0.2:2
"""
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_CPUS_PER_TASK",
    "SLURMD_NODENAME",
)
# Keeps what comes, and gives it back; to stderr if nobody is there any more.
_KEEPER = """
import os, sys
kept = sys.stdin.buffer.read()
try:
    sys.stdout.buffer.write(kept)
    sys.stdout.flush()
except BrokenPipeError:
    sys.stderr.buffer.write(kept)
    os._exit(1)
"""
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "HOSTNAME", "POD_IP")


def main(argv: list[str]) -> int:
    """Runs the command; returns 0 if all is well, else 1."""
    options = _parser().read_flags(argv)
    if options.hooks:
        return show_hooks(as_json=options.json)
    if options.links:
        return show_links(as_json=options.json)
    if flags.read_hosts(options):
        return host_doctor.check(
            options.hosts, options.ssh, options.remote_python, options.start_timeout
        )
    if options.json:
        raise UsageError("--json goes with --hooks and --links. Received: --json")
    problems: list[str] = []
    _software(problems)
    with _later() as said:
        _machine(problems, options.devices, options.kernels)
    _cluster(problems, options.timeout)
    _scheduler()
    _tensorflow(said)
    print()
    if not problems:
        print("No problem found.")
        return 0
    print(f"{len(problems)} problem(s):")
    for number, problem in enumerate(problems, 1):
        print(f"  {number}. {problem}")
    return 1


def _parser() -> Parser:
    parser = Parser(_USAGE)
    parser.number("timeout", float, "Seconds that connecting to another task may take.", 3.0)
    parser.switch("devices", "Whether to import TensorFlow and list devices.", True)
    parser.switch("kernels", "Compile the C++ kernels if they are not yet.")
    parser.switch("hooks", "Show the functions of Keras that are replaced, and no more.")
    parser.switch(
        "links", "Measure the links between the workers of TF_CONFIG's cluster, and no more."
    )
    flags.add_hosts(parser, start_seconds=10.0)
    parser.switch("json", "With --hooks or --links: in JSON.")
    return parser


def _software(problems: list[str]) -> None:
    print("software")
    _row("python", f"{platform.python_version()} ({sys.executable})")
    for package in (versions.TENSORFLOW, versions.KERAS):
        _row(package.module, versions.installed_version(package) or "not installed")
        problem = versions.problem(package)
        if problem is not None:
            problems.append(problem)
    for name in ("numpy", "keras-psplus"):
        version = _version(name)
        _row(name, version or "not installed")
        if version is None and name != "keras-psplus":
            problems.append(f"{name} is not installed: `pip install {name}`")
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow (KERAS_BACKEND is not set)"
    _row("KERAS_BACKEND", backend)
    if not backend.startswith("tensorflow"):
        problems.append(
            "keras_psplus needs Keras's TensorFlow backend: unset KERAS_BACKEND or set it to "
            f"tensorflow. Received: KERAS_BACKEND={backend}"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    if package != "keras-psplus":
        return None
    return versions.__version__ + " (checkout)"  # which is not installed


def _machine(problems: list[str], with_devices: bool, compiles: bool) -> None:
    print("\nmachine")
    _row("host", platform.node())
    _row("cores", f"{available_cores()} usable of {os.cpu_count()}")
    _row("memory", _memory())
    if not with_devices:
        return
    try:
        import tensorflow as tf

        devices = tf.config.list_physical_devices()
    except Exception as error:
        problems.append(f"TensorFlow cannot be used: {error}")
        return
    _row("devices", ", ".join(device.name.removeprefix("/physical_device:") for device in devices))
    from keras_psplus import native

    _row("C++ kernels", native.state(compiles))
    try:
        import keras

        _row("Keras backend", keras.config.backend())
    except Exception as error:  # a backend that is not installed shows at import
        problems.append(f"Keras cannot be imported: {type(error).__name__}: {error}")
        return
    if keras.config.backend() != "tensorflow":
        problems.append(
            f"Keras runs on {keras.config.backend()!r}: set KERAS_BACKEND=tensorflow, or correct "
            "~/.keras/keras.json"
        )
    if not problems:
        try:
            keras_psplus._load()
        except ImportError as error:
            problems.append(str(error))


@contextlib.contextmanager
def _later() -> Iterator[list[str]]:
    """Context that captures stderr; returns a list that receives its lines.

    TensorFlow's C++ writes past Python, into the middle of the table. If it ends this process, the
    lines are shown all the same, by the process that keeps them.
    """
    lines: list[str] = []
    sys.stderr.flush()
    command = [sys.executable, "-I", "-S", "-c", _KEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdin is not None and keeper.stdout is not None
        kept = os.dup(2)
        os.dup2(keeper.stdin.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            keeper.stdin.close()
            lines += keeper.stdout.read().decode(errors="replace").splitlines()


def _tensorflow(said: list[str]) -> None:
    """Shows what was written to stderr meanwhile, but for what TensorFlow says of itself."""
    is_noise = NoiseFilter().is_noise
    lines = [line for line in said if line.strip() and not is_noise(line)]
    if lines:
        print("\nTensorFlow says")
        for line in lines:
            print(f"  {line}")


def _memory() -> str:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        total, free = (int(fields[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown"
    return f"{free:.1f} GiB free of {total:.1f} GiB"


def _cluster(problems: list[str], timeout: float) -> None:
    try:
        given = bool(os.environ.get("TF_CONFIG", "").strip())
        ranks = None if given else find_ranks(os.environ)
        print(f"\ncluster ({'TF_CONFIG' if ranks is None else ranks.source})")
        with _table_alone():
            config = find_task_config(timeout=timeout)
    except ClusterConfigError as error:
        print("  cannot be used, see below")
        problems.append(str(error))
        return
    if config is None:
        print("  none: this process trains alone")
        return
    reasons = probe_peers(config, timeout)
    for job, index, address in config.tasks():
        name = f"{job}-{index}"
        _row(name, f"{address:<24} {_state(name, config, reasons, problems)}")
    if config.address is None:
        _row(config.name, "this process, beside the cluster")
    if find.proxy_of() is not None:
        # `find_task_config` has seen to it, as it does in the tasks.
        _row("proxy", f"{find.proxy_of()}; tasks talk to each other without it")
    role = "saves checkpoints" if config.is_chief else "does not save checkpoints"
    _row("this process", f"{config.name}, {role}")


@contextlib.contextmanager
def _table_alone() -> Iterator[None]:
    """Context without the lines that tasks log, as the table says the same."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _state(
    name: str, config: TaskConfig, reasons: Mapping[str, str | None], problems: list[str]
) -> str:
    if name == config.name:
        try:
            check_local_address(config, log=lambda line: print(f"  note: {line}"))
        except ClusterStartupError as error:
            problems.append(str(error))
            return "this process: CANNOT LISTEN"
        return "this process: port is free"
    reason = reasons[name]
    if reason is None:
        return "reachable"
    problems.append(f"{name} cannot be reached: {reason}")
    return f"NOT REACHABLE: {reason}"


def _scheduler() -> None:
    for title, variables in (("Slurm", _SLURM), ("Kubernetes", _KUBERNETES)):
        if variables[0] in os.environ:
            print(f"\n{title}")
            for name in variables:
                _row(name, os.environ.get(name, "not set"))


def _row(name: str, value: str) -> None:
    print(f"  {name:<16} {value}")


# `keras-psplus doctor --links`: the links between workers, as `topology="auto"` measures them.


def show_links(as_json: bool = False) -> int:
    """Measures the links between TF_CONFIG's workers; the chief prints a table.

    Each worker runs this.

    Args:
        as_json: Whether the chief prints JSON instead, and the others nothing.

    Returns:
        0, or 1 if there is no such cluster.
    """
    try:
        task = find_task_config()
    except ClusterConfigError as error:
        return _complain(error)
    if task is None or task.num_workers < 2:
        return _complain(
            "--links needs a cluster of at least two workers, and has to be started in each of "
            "them with its TF_CONFIG, as the training would be. "
            f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')}"
        )
    if task.task_type not in ("chief", "worker"):
        return _complain(f"--links measures workers. Received: {task.name}")
    # Servers take no part.
    workers = {job: addresses for job, addresses in task.cluster.items() if job != "ps"}
    os.environ["TF_CONFIG"] = dataclasses.replace(task, cluster=workers).to_tf_config()
    import keras_psplus
    from keras_psplus.all_reduce.topology import auto_topology

    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    decision = auto_topology.decide(strategy.extended)
    if not strategy.is_chief:
        print(f"{task.name} has measured its links; the chief shows them.", file=sys.stderr)
    elif as_json:
        found = auto_topology.as_file(decision.links, strategy.extended.control.names)
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(decision.report)
    return 0


def _complain(problem: object) -> int:
    print(f"keras-psplus doctor: {problem}", file=sys.stderr)
    return 1


# `keras-psplus doctor --hooks`: the functions that are replaced, and what this Keras has.


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def show_hooks(as_json: bool = False) -> int:
    """Prints the list of hooks.

    Args:
        as_json: Whether to print a list of dicts instead of text.

    Returns:
        The exit code: 1 if one does not fit.
    """
    try:
        from keras_psplus.keras_hooks import HOOKS
    except ImportError as error:
        # A part of Keras is gone as a whole: its name is in the error.
        print(
            json.dumps([{"name": None, "fits": False, "problem": f"{error}"}]) if as_json else error
        )
        return 1
    rows = [_hook_row(hook) for hook in HOOKS]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print(_text(rows))
    return 0 if all(row["fits"] for row in rows) else 1


def _hook_row(hook: Hook) -> dict[str, Any]:
    try:
        hook.check_signature()
        problem = None
    except ImportError as error:
        problem = f"{error}"
    return {
        "name": hook.where,
        "parameters": hook.parameters,
        "found": hook.found(),
        "is_added": hook.is_added,
        "fits": problem is None,
        "problem": problem,
        "answered_by": hook.answered_by,
        "why": hook.why,
    }


def _text(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        relied = "is added" if row["is_added"] else f"({', '.join(row['parameters'])})"
        lines.append(f"{row['name']} {relied}")
        lines.append(f"  answered by {row['answered_by']}: {row['why']}")
        if not row["fits"]:
            found = row["found"]
            had = "nothing of this name" if found is None else f"({', '.join(found)})"
            lines.append(f"  DOES NOT FIT: this Keras has {had}")
    bad = sum(not row["fits"] for row in rows)
    lines += ["", f"{len(rows)} functions are replaced; {bad or 'none'} of them do not fit."]
    return "\n".join(lines)
