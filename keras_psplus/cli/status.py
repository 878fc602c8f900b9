"""`keras-psplus status`: the local jobs of this user, and how far their tasks are."""

import datetime
import json
import pathlib
import shlex
import sys
from typing import Any

from keras_psplus import process_identity, text_table
from keras_psplus.cli.flags import Parser
from keras_psplus.cluster.launcher.task_ends import describe
from keras_psplus.cluster.monitor import job as job_folder
from keras_psplus.cluster.monitor import step_times

_USAGE = """
usage: keras-psplus status [flags]

Shows the jobs that `keras-psplus run` has under way on this machine for this user, with a line for
each task: whether its process runs, how far its training is, and when it last waited for long.
Milliseconds, bytes and waits are those of one step. A worker or server that holds the others up is
named, with the cause. A job whose launcher was killed is shown as
ended, until --clear removes what it has left.
"""
_HEADINGS = (
    *("task", "pid", "state", "step", "epoch", "loss", "ms", "sent", "received", "wait ms"),
    *("said", "last stall"),
)
_NONE = "-"


def main(argv: list[str]) -> int:
    """Runs the command; returns 0, or 1 if jobs cannot be read."""
    options = _parser().read_flags(argv)
    try:
        found = job_folder.read_all()
    except OSError as error:
        print(f"keras-psplus status: {error}", file=sys.stderr)
        return 1
    jobs = [_job(*each) for each in found]
    if options.clear:
        ended = [job for job in jobs if not job["is_running"]]
        for job in ended:
            job_folder.remove(pathlib.Path(job["folder"]))
        jobs = [job for job in jobs if job["is_running"]]
    if options.json:
        print(json.dumps(jobs, indent=2))
    else:
        print("\n\n".join(map(_text, jobs)) or "no job of `keras-psplus run` is under way")
    return 0


def _parser() -> Parser:
    parser = Parser(_USAGE)
    parser.switch("json", "Print JSON: a list of jobs.")
    parser.switch("clear", "Remove what jobs whose launchers were killed have left.")
    return parser


def _job(
    folder: pathlib.Path, job: dict[str, Any], said: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """A job as `--json` has it."""
    known = ("pid", "began", "command", "layout", "log_dir", "json_log", "restart")
    tasks = {name: _task(name, task, said[name]) for name, task in job["tasks"].items()}
    slowest = _slowest([said[name] for name, task in tasks.items() if task["said"] is not None])
    return {
        **{name: job[name] for name in known},
        "folder": str(folder),
        "is_running": job_folder.is_running(job),
        "slowest": None if slowest is None else {**slowest.to_json(), "text": str(slowest)},
        "tasks": tasks,
    }


def _slowest(said: list[dict[str, Any]]) -> step_times.Slowest | None:
    """Finds the task that holds the others up, by the last summaries."""
    packed = {name: times for each in said for name, times in each.get("times", {}).items()}
    return step_times.slowest({name: step_times.unpacked(each) for name, each in packed.items()})


def _task(name: str, task: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    code = task["exit_code"]
    state = process_identity.state_of(task["pid"], task["birth"])
    # Lines from before a restart are not of the new process.
    is_of_process = said.get("timestamp", "") >= task["began"]
    return {
        "role": name.rpartition("-")[0],
        "pid": task["pid"],
        "state": process_identity.ENDED if code is not None else state,
        "exit_code": code,
        "said": said.get("timestamp") if is_of_process else None,
        "steps": said.get("steps") if is_of_process else None,
        "stall": said.get("stall") if is_of_process else None,
    }


def _text(job: dict[str, Any]) -> str:
    state = "running" if job["is_running"] else "ended: its launcher is gone"
    restarts = f", restart {job['restart']}" if job["restart"] else ""
    lines = [
        f"{shlex.join(job['command'])}: {state} ({_age(job['began'])}{restarts})",
        f"launcher {job['pid']}, logs in {job['log_dir']}",
    ]
    if job["slowest"]:
        lines.append(f"slowest: {job['slowest']['text']}")
    rows = [_HEADINGS, *(_row(name, task) for name, task in job["tasks"].items())]
    return "\n".join([*lines, text_table.aligned(rows)])


def _row(name: str, task: dict[str, Any]) -> tuple[str, ...]:
    state = task["state"]
    if task["exit_code"] is not None:
        state = describe(task["exit_code"])
    steps, stall = task["steps"] or {}, task["stall"]
    known = ("step", "epoch", "loss", "ms", "bytes_sent", "bytes_received", "wait_ms")
    return (
        name,
        str(task["pid"]),
        state,
        *(_number(steps.get(each)) for each in known),
        _NONE if task["said"] is None else _age(task["said"], " ago"),
        _NONE if stall is None else _stall(stall),
    )


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _stall(stall: dict[str, Any]) -> str:
    if stall["is_over"]:
        return f"{_age(stall['timestamp'], ' ago')}, of {stall['seconds']:.0f} s"
    return f"now, for {stall['seconds']:.0f} s: {stall['message']}"


def _age(timestamp: str, ending: str = "") -> str:
    began = datetime.datetime.fromisoformat(timestamp)
    seconds = max(0, round((datetime.datetime.now(datetime.UTC) - began).total_seconds()))
    return f"{seconds} s{ending}" if seconds < 120 else f"{seconds // 60} min{ending}"
