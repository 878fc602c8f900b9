"""Kubernetes Indexed Job, whose pods find each other by a headless service."""

import textwrap
from typing import Any

from keras_psplus.cli.manifests import pods

_LABEL = "batch.kubernetes.io/job-name"


def documents(values: dict[str, Any], counts: dict[str, int], max_restarts: int) -> str:
    """Returns the documents of a job.

    Args:
        values: What they are filled with, by `pods`.
        counts: Dict from job types to numbers of tasks.
        max_restarts: How often all tasks may fail.
    """
    name, size = values["name"], sum(counts.values())
    # When one task is lost, the others end as well, where the strategy does not go on.
    job = pods.spec_of_job(values, size, max_restarts * size, f"subdomain: {name}\n")
    service = f"""\
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # A pod's name resolves before the pod is ready.
  selector: {{{_LABEL}: {name}}}
  ports: [{{name: tensorflow, port: {pods.PORT}}}]
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
"""
    return pods.around(values, _LABEL) + service + textwrap.indent(job, "  ").rstrip("\n")
