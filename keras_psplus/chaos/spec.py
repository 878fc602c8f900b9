"""The text that says which faults a job is to have."""

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

KINDS = {
    "kill": (),
    "preempt": (),
    "stop": ("for",),
    "slow": ("factor", "for"),
    "cut": ("for",),
    "delay": ("ms", "for"),
}
GRAMMAR = """faults are KIND:TASK@step=N, separated by ';'
  kill:worker1@step=20                      killed by SIGKILL
  preempt:worker1@step=20                   told to end by SIGTERM, as by a scheduler
  stop:ps0@step=10,for=5                    stopped for 5 s; without `for`, for good
  slow:worker1@step=5,factor=5,for=20       5 times as slow for 20 s
  cut:worker1@step=20,for=5                 cut off from all others for 5 s (*)
  delay:ps0@step=20,ms=50,for=10            all that it sends takes 50 ms more for 10 s (*)
  kill:random@seed=3,within=100             a task and a step, at most 100, drawn by the seed
TASK is chief, worker0, worker1, ps0, ...; N counts the chief's (or worker 0's) training steps.
(*) needs Linux, root, iproute2 and util-linux: each task gets its own network namespace."""
_EVENT = re.compile(r"(\w+):([\w-]+)@(.*)", re.DOTALL)
_DEFAULT_WITHIN = 100
_Number = TypeVar("_Number", int, float)


@dataclasses.dataclass(frozen=True)
class Event:
    """One fault.

    Args:
        kind: One of `KINDS`.
        task: Name of the task, e.g. `"worker-1"`.
        step: Number of the training step after which it comes.
        seconds: How long it lasts; None for good.
        factor: Of `slow`, how many times as slow.
        ms: Of `delay`, milliseconds.
        seed: What task and step were drawn by, or None.
    """

    kind: str
    task: str
    step: int
    seconds: float | None = None
    factor: float | None = None
    ms: float | None = None
    seed: int | None = None

    def __str__(self) -> str:
        words = [f"step={self.step}"]
        for name, value in (("factor", self.factor), ("ms", self.ms), ("for", self.seconds)):
            words += [] if value is None else [f"{name}={value:g}"]
        return f"{self.kind}:{self.task.replace('-', '')}@{','.join(words)}"


def parse(text: str, tasks: Sequence[str]) -> list[Event]:
    """Reads what `--chaos` was given.

    Example:

    ```python
    parse("kill:worker1@step=20; stop:ps0@step=10,for=5", ["worker-0", "worker-1", "ps-0"])
    ```

    Args:
        tasks: Names of the cluster's tasks.

    Returns:
        A list of `Event`, in the order of their steps.

    Raises:
        ValueError: If it is none; the message shows the grammar.
    """
    try:
        events = [_event(part.strip(), tasks) for part in text.split(";") if part.strip()]
        if not events:
            raise ValueError("There is no fault in it")
    except ValueError as error:
        raise ValueError(f"{error}; {GRAMMAR}\nReceived: --chaos={text!r}") from None
    return sorted(events, key=lambda event: event.step)


def _event(text: str, tasks: Sequence[str]) -> Event:
    match = _EVENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} cannot be read")
    kind, task, rest = match.groups()
    if kind not in KINDS:
        raise ValueError(f"There is no fault {kind!r}, only {', '.join(KINDS)}")
    words: dict[str, Any] = {}
    for word in rest.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name in words:
            raise ValueError(f"{word.strip()!r} in {text!r} cannot be read")
        words[name] = value
    seed = None
    if task == "random":
        seed = _number(words, "seed", int, 0)
        most = _number({"within": _DEFAULT_WITHIN, **words}, "within", int, 1)
        words.pop("within", None)
        # Both in any case, so that the task does not depend on what was said of the step.
        drawn = random.Random(seed)
        task, step = drawn.choice(tasks), drawn.randint(1, most)
        words.pop("seed")
        words.setdefault("step", step)
    unknown = set(words) - {"step", *KINDS[kind]}
    if unknown:
        raise ValueError(f"{kind} does not take {', '.join(sorted(unknown))!r}")
    return Event(
        kind,
        _task(task, tasks),
        _number(words, "step", int, 1),
        _number(words, "for", float, 0, above=True) if "for" in words else None,
        _number(words, "factor", float, 1, above=True) if kind == "slow" else None,
        _number(words, "ms", float, 0, above=True) if kind == "delay" else None,
        seed,
    )


def _task(name: str, tasks: Sequence[str]) -> str:
    by_name = {name: task for task in tasks for name in (task, task.replace("-", ""))}
    found = by_name.get("chief0" if name == "chief" else name)
    if found is None:
        there = ", ".join(task.replace("-", "") for task in tasks)
        raise ValueError(f"The cluster has no task {name!r}, but {there}")
    return found


def _number(
    words: Mapping[str, Any],
    name: str,
    kind: Callable[[Any], _Number],
    least: float,
    above: bool = False,
) -> _Number:
    if name not in words:
        raise ValueError(f"`{name}` is missing")
    try:
        value: float = kind(words[name])
    except ValueError:
        value = float("nan")
    good = value > least if above else value >= least
    if not good or value == float("inf"):
        whole = "a whole number" if kind is int else "a number"
        bound = f"above {least}" if above else f"from {least} up"
        raise ValueError(f"`{name}` must be {whole} {bound}, not {words[name]!r}")
    return kind(value)
