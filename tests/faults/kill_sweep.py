"""Kills tasks of jobs at one point of a save after the other; each restart has to resume exactly.

kill_sweep.py KIND [--count N] [--first N] [--tasks TASK ...] [--own]

Each start of the job goes on from what the kill before has left. Every epoch of every start has to
end with the weights of a job that nobody has disturbed, bit for bit. Kills go through the tasks in
turn, and each next round is one point later. To be run by hand; a test of the suite has a few.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from keras_psplus.cluster.processes import LocalCluster
from tests import warm
from tests.support.jobs import environment

JOB = pathlib.Path(__file__).with_name("kill_job.py")
CLUSTERS = {
    "diloco": {"workers": 2},
    "powersgd": {"workers": 2},
    "accumulate": {"workers": 2},
    "hybrid": {"workers": 2, "ps": 1},
    "sync_ps": {"workers": 2, "ps": 1, "chief": True},
}


_EPOCH = re.compile(r"^epoch (\d+) (\w+)$", re.MULTILINE)
_ERROR = re.compile(r"(\w+LostError: .{40})")


def start(kind, folder, kill=None, own=False, epochs=None, grace=0.5, timeout=120):
    """Runs the job once.

    Args:
        kind: Kind of job.
        folder: The job's folder.
        kill: Triple of the task that counts points, of its victim and of the point; or None.
        own: Whether each worker has a folder of its own.
        epochs: How many epochs there are.
        grace: Seconds after which those that wait for the one that was killed are ended, too.
        timeout: Seconds.

    Returns:
        The cluster's result, and list of triples: a task, the number of an epoch, and a hash.
    """
    env = environment()
    if kill:
        env["KILL"] = ":".join(map(str, kill))
    if epochs:
        env["EPOCHS"] = str(epochs)
    command = [sys.executable, str(JOB), kind, str(folder), *(["own"] if own else [])]
    logs = folder / "logs"
    ends = {"failure_grace": grace, "kill_grace": 0.5}
    with LocalCluster(command, **CLUSTERS[kind], **ends, env=env, log_dir=logs) as cluster:
        result = cluster.wait(timeout)
    assert not result.timed_out, result.tails(60)
    found = [
        (task, int(epoch), weights)
        for task, log in result.logs.items()
        # Parameter servers go on without a worker, and without what it had kept.
        for epoch, weights in _EPOCH.findall(log.partition("\nkills ")[0])
    ]
    return result, found


def sweep(kind, points, folder, own=False, epochs=None, grace=0.5, log=print):
    """Kills a job at some points, one after the other, and then lets it end.

    Args:
        kind: Kind of job.
        points: List of triples as for `start`.
        folder: An empty folder.
        own: Whether each worker has a folder of its own.
        epochs: How many epochs there are.
        grace: As for `start`.
        log: Function that takes a line of progress.

    Returns:
        List of texts, one for each epoch that did not end as it had to.
    """
    whole, resumed, wrong = folder / "whole", folder / "resumed", []
    for path in (whole, resumed):
        path.mkdir()
    result, found = start(kind, whole, epochs=epochs)
    assert result.exit_code == 0, result.tails(60)
    expected = {epoch: weights for _, epoch, weights in found}
    assert len(expected) == len(set(expected.values())) == (epochs or len(expected))
    for kill in (*points, None):
        began = time.monotonic()
        result, found = start(kind, resumed, kill, own, epochs, grace)
        was_killed = any(f"kills {kill[1]}" in log for log in result.logs.values()) if kill else 0
        assert was_killed or result.exit_code == 0, result.tails(60)
        bad = [f"{task}: epoch {e}" for task, e, weights in found if weights != expected[e]]
        lost = [log for log in result.logs.values() if " are lost: " in log]
        wrong += [f"{kill}: {text}" for text in bad]
        wrong += [f"{kill}: what workers keep is lost" for _ in lost]
        epoch = found[0][1] if found else "-"
        errors = {error for log in result.logs.values() for error in _ERROR.findall(log)}
        log(
            f"{kill}: killed={bool(was_killed)}, {len(found)} epochs from {epoch} on, "
            f"{time.monotonic() - began:.0f} s {'WRONG' if bad else ''} {', '.join(errors)}"
        )
        if bad or lost:
            log(result.tails(30))
        if kill and not was_killed:
            log("the job has ended before that point")
            break
    return wrong


def points_of(kind, tasks, first, count):
    """Triples for `start`: task after task, and then the next point."""
    cluster = CLUSTERS[kind]
    leader = "chief-0" if cluster.get("chief") else "worker-0"
    names = [f"worker-{i}" for i in range(cluster["workers"])]
    names += [f"ps-{i}" for i in range(cluster.get("ps", 0))]
    names = tasks or ([leader, *names] if leader == "chief-0" else names)
    # Workers of parameter servers, and the servers, run no callbacks.
    counts = {n: n if n.startswith("worker") and leader != "chief-0" else leader for n in names}
    every = [(counts[name], name, at) for at in range(1, 1000) for name in names]
    return every[first : first + count]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=list(CLUSTERS))
    parser.add_argument("--first", type=int, default=0, help="number of the first point")
    parser.add_argument("--count", type=int, default=40, help="number of points")
    parser.add_argument("--tasks", nargs="*", help="which tasks are killed; all by default")
    parser.add_argument("--grace", type=float, default=0.5, help="seconds for the survivors")
    parser.add_argument("--own", action="store_true", help="a folder for each worker")
    options = parser.parse_args()
    subprocess.Popen = warm.Popen
    points = points_of(options.kind, options.tasks, options.first, options.count)
    with tempfile.TemporaryDirectory(prefix="kill_sweep_") as folder:
        wrong = sweep(options.kind, points, pathlib.Path(folder), options.own, grace=options.grace)
    print(f"{len(points)} points, {len(wrong)} wrong epochs", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
