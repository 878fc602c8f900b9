"""Common parts of the Kubernetes manifests of `export`, as YAML."""

import string
import textwrap
from collections.abc import Mapping
from typing import Any

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
        values: What the manifest is filled with.
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
        values: What the manifest is filled with.
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
