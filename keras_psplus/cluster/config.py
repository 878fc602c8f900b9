"""TF_CONFIG, read and checked before TensorFlow can hang on a mistake in it."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence

from keras_psplus.errors import ClusterConfigError as ClusterConfigError
from keras_psplus.errors import ClusterStartupError as ClusterStartupError

JOB_TYPES = ("chief", "worker", "ps")  # canonical order: who decides, who computes, who serves
EVALUATOR = "evaluator"

_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """One task's view of its cluster: every task's address and which one it is.

    Example:

    ```python
    config = TaskConfig({"worker": ("h1:2222", "h2:2222")}, "worker", 1)
    config.name     # "worker-1"
    config.address  # "h2:2222"
    ```

    Args:
        cluster: Dict from job type (`"chief"`, `"worker"`, `"ps"`) to the
            `host:port` addresses of its tasks.
        task_type: This task's job type, or `"evaluator"`, which runs beside
            the cluster and is not in `cluster`.
        task_index: This task's position in its job.
    """

    cluster: dict[str, tuple[str, ...]]
    task_type: str
    task_index: int

    @property
    def name(self) -> str:
        """The task's short name, e.g. `"worker-1"`."""
        return task_name(self.task_type, self.task_index)

    @property
    def device(self) -> str:
        """The task's TensorFlow device, e.g. `"/job:worker/replica:0/task:1"`."""
        return f"/job:{self.task_type}/replica:0/task:{self.task_index}"

    @property
    def address(self) -> str | None:
        """The task's `host:port`; `None` for an evaluator, which has no server."""
        if self.task_type == EVALUATOR:
            return None
        return self.cluster[self.task_type][self.task_index]

    @property
    def is_chief(self) -> bool:
        """Whether this task saves checkpoints: the chief, or worker 0 if there is no chief."""
        if "chief" in self.cluster:
            return self.task_type == "chief"
        return self.task_type == "worker" and self.task_index == 0

    @property
    def num_workers(self) -> int:
        """Number of tasks that compute: the chief and the workers."""
        return len(self.cluster.get("chief", ())) + len(self.cluster.get("worker", ()))

    @property
    def num_ps(self) -> int:
        """Number of parameter servers in the cluster."""
        return len(self.cluster.get("ps", ()))

    def tasks(self) -> list[tuple[str, int, str]]:
        """Lists the cluster's tasks, this one among them.

        Returns:
            A list of `(type, index, address)`: the chief, then workers, then ps.
        """
        return [
            (job, index, address)
            for job in JOB_TYPES
            for index, address in enumerate(self.cluster.get(job, ()))
        ]

    def peers(self, types: Collection[str] = JOB_TYPES) -> list[tuple[str, int, str]]:
        """Lists the tasks of the given job types except this one.

        Args:
            types: Job types, e.g. `("chief", "worker")`.

        Returns:
            A list of `(type, index, address)` in canonical order.
        """
        me = (self.task_type, self.task_index)
        return [task for task in self.tasks() if task[0] in types and task[:2] != me]

    def to_tf_config(self) -> str:
        """Returns the TF_CONFIG value (a JSON string) that describes this task."""
        return json.dumps(
            {
                "cluster": {job: list(self.cluster[job]) for job in self._jobs()},
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )

    def describe(self) -> str:
        """Returns a short text: one line per task, this task marked."""
        lines = []
        for job, index, address in self.tasks():
            mine = "  <- this task" if (job, index) == (self.task_type, self.task_index) else ""
            lines.append(f"{task_name(job, index):<10} {address}{mine}")
        if self.task_type == EVALUATOR:
            lines.append(f"{self.name:<10} (beside the cluster)  <- this task")
        return "\n".join(lines)

    def _jobs(self) -> list[str]:
        return [job for job in JOB_TYPES if job in self.cluster]


def task_name(task_type: str, task_index: int) -> str:
    """Returns a task's short name, e.g. `"worker-1"`."""
    return f"{task_type}-{task_index}"


def split_address(address: str) -> tuple[str, int]:
    """Splits `"host:2222"` or `"[::1]:2222"` into host, without brackets, and port."""
    if "://" in address:
        raise ValueError("leave out the scheme: write host:port")
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError("an address is host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("write an IPv6 host in brackets: [::1]:2222")
    if not host or any(c.isspace() or c in "/[],\0" for c in host):
        raise ValueError("an address is host:port")
    try:
        host.encode("idna")  # As the resolver does.
    except UnicodeError as error:
        raise ValueError(f"its host name cannot be looked up: {error}") from None
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ValueError("the port is a number from 1 to 65535")
    return host, int(port)


def read_task_config(environ: Mapping[str, str] | None = None) -> TaskConfig | None:
    """Reads and checks TF_CONFIG.

    Example:

    ```python
    config = read_task_config()
    if config is not None and config.is_chief:
        ...
    ```

    Args:
        environ: The environment to read; `os.environ` by default.

    Returns:
        A `TaskConfig`, or `None` if TF_CONFIG is not set or holds no cluster.

    Raises:
        ClusterConfigError: If TF_CONFIG cannot be used; the message says why
            and how to write it.
    """
    text = (os.environ if environ is None else environ).get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        parsed = json.loads(text)
    except (RecursionError, ValueError) as error:
        if not isinstance(error, json.JSONDecodeError):
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise _unusable(reason, text) from None
        raise ClusterConfigError(
            f"TF_CONFIG is not valid JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}, near {text[max(0, error.pos - 20) : error.pos + 20]!r}. "
            f"It should look like {_EXAMPLE}. Received: TF_CONFIG={_shorten(text)}"
        ) from None
    try:
        if not isinstance(parsed, dict):
            raise ValueError("it should be a JSON object with the keys 'cluster' and 'task'")
        cluster = _read_cluster(parsed.get("cluster"))
        if cluster is None:
            return None
        return TaskConfig(cluster, *_read_task(parsed.get("task"), cluster))
    except RecursionError:
        raise _unusable("it is nested too deeply", text) from None
    except ValueError as error:
        raise _unusable(error, text) from None


def _unusable(reason: object, text: str) -> ClusterConfigError:
    return ClusterConfigError(
        f"TF_CONFIG cannot be used: {reason}. It should look like {_EXAMPLE}. "
        f"Received: TF_CONFIG={_shorten(text)}"
    )


def _read_cluster(spec: object) -> dict[str, tuple[str, ...]] | None:
    if spec is None or spec == {}:
        return None
    if not isinstance(spec, dict):
        raise ValueError("'cluster' should be an object from job names to lists of addresses")
    for job, addresses in spec.items():
        _check_job(job, addresses)
    if "chief" not in spec and "worker" not in spec:
        raise ValueError("the cluster has neither a chief nor a worker: nothing would train")
    seen: dict[tuple[str, int], str] = {}
    for job in JOB_TYPES:
        for index, address in enumerate(spec.get(job, ())):
            _check_address(task_name(job, index), address, seen)
    return {job: tuple(spec[job]) for job in JOB_TYPES if job in spec}


def _check_job(job: str, addresses: object) -> None:
    if job == EVALUATOR:
        raise ValueError(
            "the evaluator runs outside the cluster: remove 'evaluator' from 'cluster' and "
            "only give the evaluator's own process the task type 'evaluator'"
        )
    if job not in JOB_TYPES:
        hint = "; 'master' is called 'chief' now" if job == "master" else ""
        raise ValueError(f"job {job!r} is none of {', '.join(JOB_TYPES)}{hint}")
    if not isinstance(addresses, list):
        raise ValueError(f"job {job!r} should be a list of host:port strings")
    if not addresses:
        raise ValueError(f"job {job!r} has no tasks: leave the job out or give it addresses")
    if job == "chief" and len(addresses) > 1:
        raise ValueError(f"a cluster has at most one chief, this one has {len(addresses)}")


def _check_address(name: str, address: object, seen: dict[tuple[str, int], str]) -> None:
    if not isinstance(address, str):
        raise ValueError(f"the address of {name} is not a string but {address!r}")
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ValueError(f"the address of {name}, {address!r}, is wrong: {error}") from None
    other = seen.setdefault((host.lower(), port), name)
    if other != name:
        raise ValueError(f"{other} and {name} have the same address {address!r}")


def _read_task(task: object, cluster: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        raise ValueError("'task' is missing: it says which task of the cluster this process is")
    task_type, index = task.get("type"), task.get("index")
    known = [*cluster, EVALUATOR]
    if task_type is None:
        raise ValueError(f"the task has no 'type' (one of {', '.join(known)})")
    if task_type not in known:
        raise ValueError(
            f"the task's type {task_type!r} is not in the cluster (one of {', '.join(known)})"
        )
    if index is None:
        raise ValueError("the task has no 'index'")
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError(f"the task's index should be a whole number without quotes, not {index!r}")
    count = len(cluster[task_type]) if task_type in cluster else None
    if index < 0 or (count is not None and index >= count):
        raise ValueError(
            f"the task's index {index} is out of range: "
            + (f"job {task_type!r} has tasks 0 to {count - 1}" if count else "it starts at 0")
        )
    return task_type, index


def _shorten(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"
