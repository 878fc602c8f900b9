"""Kubernetes JobSet: a Job for each kind of task, restarted together.

Reference: https://jobset.sigs.k8s.io/docs/concepts/. The JobSet's controller makes the headless
service. When one of its Jobs has failed, it recreates all Jobs, up to `maxRestarts` times.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from keras_psplus.cli.manifests import pods
from keras_psplus.cluster.discovery.kubernetes import ROLE_VARIABLE
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE

_LABEL = "jobset.sigs.k8s.io/jobset-name"


def documents(
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
    text = pods.around(values, _LABEL) + head
    for job in jobs:
        goes_on = job == "worker" and _goes_on_without_a_worker(counts, strategy)
        failures = max_restarts * counts[job] if goes_on else 0
        more = f"- {{name: {ROLE_VARIABLE}, value: {job}}}\n"
        at_first = counts[job]
        if min_workers is not None:
            more += f'- {{name: {MIN_WORKERS_VARIABLE}, value: "{min_workers}"}}\n'
            at_first = min_workers if job == "worker" else at_first
        spec = pods.spec_of_job(values, counts[job], failures, of_container=more, at_first=at_first)
        text += f"  - name: {job}\n    replicas: 1\n    template:\n      spec:\n"
        text += textwrap.indent(spec, " " * 8)
    return text.rstrip("\n")


def _goes_on_without_a_worker(counts: Mapping[str, int], strategy: str | None) -> bool:
    """Whether a worker alone is started again, as `keras-psplus run` has it."""
    known = strategy in (None, "ParameterServerStrategy")
    return known and bool(counts["chief"]) and bool(counts["ps"])
