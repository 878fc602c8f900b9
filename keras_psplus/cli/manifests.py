"""Kubernetes manifests of `export`, as YAML."""

import string
import textwrap
from collections.abc import Mapping
from typing import Any

from keras_psplus.cluster.discovery.launchers import ROLE_VARIABLE
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE

# Common parts of the Kubernetes manifests of `export`, as YAML.


PORT = 2222
_AROUND = """
apiVersion: v1
kind: Secret
metadata: {name: $name-token}
stringData: {token: $token}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: $name}
spec:
  podSelector: {matchLabels: {$label: $name}}
  policyTypes: [Ingress]
  ingress:
  - from:
    - podSelector: {matchLabels: {$label: $name}}
---
"""
# Reference: https://kubernetes.io/docs/tasks/job/pod-failure-policy/.
_JOB = """
completionMode: Indexed
completions: $tasks
parallelism: $at_first
backoffLimit: $failures
podFailurePolicy:
  rules:
  - action: FailJob  # A wrong command line or cluster is wrong again.
    onExitCodes: {containerName: train, operator: In, values: [2]}
  - action: Ignore  # A pod that was evicted or preempted is no failure.
    onPodConditions: [{type: DisruptionTarget, status: "True"}]
template:
  spec:
    restartPolicy: Never
    enableServiceLinks: false
"""
_CONTAINER = """
    containers:
    - name: train
      image: $image
      command: $command
      ports: [{containerPort: $port}]
      env:
      - {name: PYTHONUNBUFFERED, value: "1"}
      - {name: KERAS_PSPLUS_LAYOUT, value: "$layout"}
      - {name: KERAS_PSPLUS_SUBDOMAIN, value: $name}
      - {name: KERAS_PSPLUS_PORT, value: "$port"}
      - name: $token_variable
        valueFrom: {secretKeyRef: {name: $name-token, key: token}}
"""
_RESOURCES = """
      resources:
        requests: {cpu: "$cpu", memory: $memory}
        limits: {$limits}
"""
_VOLUME = """
      volumeMounts: [{name: backups, mountPath: /backups}]
    volumes:
    - name: backups
      persistentVolumeClaim: {claimName: $claim}
"""


def around(values: dict[str, Any], label: str) -> str:
    """Returns the secret with the token, and the network policy.

    Args:
        label: The label by which all pods of the job have its name.
    """
    return _filled(_AROUND, {**values, "label": label})


def spec_of_job(
    values: dict[str, Any],
    tasks: int,
    failures: int,
    of_pod: str = "",
    of_container: str = "",
    at_first: int | None = None,
) -> str:
    """Returns the specification of a Job with a pod for each task.

    Args:
        tasks: Number of pods.
        failures: How many of them may fail until the Job has failed.
        of_pod: More lines for a pod's specification.
        of_container: More lines for its container's environment.
        at_first: Number of pods that are started; all by default.
    """
    text = "".join(
        (
            _JOB,
            textwrap.indent(of_pod, " " * 4),
            _CONTAINER.lstrip("\n"),
            textwrap.indent(of_container, " " * 6),
            _RESOURCES.lstrip("\n"),
            _VOLUME.lstrip("\n") if values["claim"] else "",
        )
    )
    numbers = {"tasks": tasks, "at_first": at_first or tasks, "failures": failures, "port": PORT}
    return _filled(text, {**values, **numbers})


def _filled(text: str, values: Mapping[str, Any]) -> str:
    return string.Template(text.lstrip("\n")).substitute(values)


# Kubernetes Indexed Job, whose pods find each other by a headless service.


_LABEL = "batch.kubernetes.io/job-name"


def indexed_job(values: dict[str, Any], counts: dict[str, int], max_restarts: int) -> str:
    """Returns the documents of a job.

    Args:
        values: What they are filled with, by `pods`.
        counts: Dict from job types to numbers of tasks.
        max_restarts: How often all tasks may fail.
    """
    name, size = values["name"], sum(counts.values())
    # When one task is lost, the others end as well, where the strategy does not go on.
    job = spec_of_job(values, size, max_restarts * size, f"subdomain: {name}\n")
    service = f"""\
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # A pod's name resolves before the pod is ready.
  selector: {{{_LABEL}: {name}}}
  ports: [{{name: tensorflow, port: {PORT}}}]
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
"""
    return around(values, _LABEL) + service + textwrap.indent(job, "  ").rstrip("\n")


# Kubernetes JobSet: a Job for each kind of task, restarted together.
#
# Reference: https://jobset.sigs.k8s.io/docs/concepts/. The JobSet's controller makes the headless
# service. When one of its Jobs has failed, it recreates all Jobs, up to `maxRestarts` times.


_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


def jobset(
    values: dict[str, Any],
    counts: dict[str, int],
    strategy: str | None,
    max_restarts: int,
    min_workers: int | None = None,
) -> str:
    """Returns the documents of a job.

    Args:
        values: What they are filled with, by `pods`.
        counts: Dict from job types to numbers of tasks.
        strategy: The strategy's class, or None if the script alone knows it.
        max_restarts: How often all tasks may fail.
        min_workers: With how many workers it begins, if others come and go; else None.
    """
    jobs = [job for job, count in counts.items() if count]
    # It has ended well when all have that run the script to its end.
    ends = [job for job in jobs if job != "ps"]
    if strategy in ("ParameterServerStrategy", "PipelineStrategy"):
        ends = ["chief"]
    head = f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: {values["name"]}}}
spec:
  network: {{enableDNSHostnames: true, publishNotReadyAddresses: true, subdomain: {values["name"]}}}
  successPolicy: {{operator: All, targetReplicatedJobs: [{", ".join(ends)}]}}
  failurePolicy:
    maxRestarts: {max_restarts}
    rules:
    - name: wrongCommandLine
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
"""
    text = around(values, _JOBSET_LABEL) + head
    for job in jobs:
        goes_on = job == "worker" and _goes_on_without_a_worker(counts, strategy)
        failures = max_restarts * counts[job] if goes_on else 0
        more = f"- {{name: {ROLE_VARIABLE}, value: {job}}}\n"
        at_first = counts[job]
        if min_workers is not None:
            more += f'- {{name: {MIN_WORKERS_VARIABLE}, value: "{min_workers}"}}\n'
            at_first = min_workers if job == "worker" else at_first
        spec = spec_of_job(values, counts[job], failures, of_container=more, at_first=at_first)
        text += f"  - name: {job}\n    replicas: 1\n    template:\n      spec:\n"
        text += textwrap.indent(spec, " " * 8)
    return text.rstrip("\n")


def _goes_on_without_a_worker(counts: Mapping[str, int], strategy: str | None) -> bool:
    """Whether a worker alone is started again, as `keras-psplus run` has it."""
    known = strategy in (None, "ParameterServerStrategy")
    return known and bool(counts["chief"]) and bool(counts["ps"])
