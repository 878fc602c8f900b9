"""Pods of an Indexed Job or of a JobSet, from the variables that Kubernetes sets.

Reference: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/. Pods of an
Indexed Job with a headless service are `JOB-INDEX.SUBDOMAIN`. Pods do not know their number:
`KERAS_PSPLUS_LAYOUT` has it. In a JobSet (https://jobset.sigs.k8s.io/docs/concepts/) each kind of
task is an Indexed Job, which `KERAS_PSPLUS_ROLE` names; pods are `JOBSET-ROLE-0-INDEX.SUBDOMAIN`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.discovery.layout import LAYOUT_VARIABLE, parse
from keras_psplus.cluster.discovery.ranks import HOSTS_VARIABLE, Ranks, number

NAME = "kubernetes"
SUBDOMAIN_VARIABLE = "KERAS_PSPLUS_SUBDOMAIN"
ROLE_VARIABLE = "KERAS_PSPLUS_ROLE"
_INDEX = "JOB_COMPLETION_INDEX"
_PORT = 2222


def read(environ: Mapping[str, str]) -> Ranks | None:
    """Reads an Indexed Job's variables; None outside of one, and for a single pod.

    Raises:
        ClusterConfigError: If the number of pods, or their names, are not known.
    """
    if _INDEX not in environ:
        return None
    index = number(_INDEX, environ[_INDEX], 0)
    if not environ.get(LAYOUT_VARIABLE):
        raise ClusterConfigError(
            f"This is pod {index} of a Kubernetes Indexed Job, but Kubernetes does not say how "
            f"many pods form the cluster. Set {LAYOUT_VARIABLE} in the pod template, such as "
            "worker:4 for four workers; or KERAS_PSPLUS_CLUSTER=none if each pod is to train "
            f"alone. Received: {_INDEX}={index}"
        )
    counts = parse(environ[LAYOUT_VARIABLE])
    size = sum(counts.values())
    if environ.get(ROLE_VARIABLE):
        return _of_jobset(environ, index, counts)
    if index >= size:
        raise ClusterConfigError(
            f"This is pod {index} of a Kubernetes Indexed Job, but the layout has {size} tasks. "
            f"Set the Job's `completions` and `parallelism` to {size}, or change {LAYOUT_VARIABLE}."
            f" Received: {_INDEX}={index}, {LAYOUT_VARIABLE}={environ[LAYOUT_VARIABLE]}"
        )
    if size == 1:
        return None
    hosts = None
    if not environ.get(HOSTS_VARIABLE):
        prefix, subdomain = _names(environ, "", index)
        hosts = tuple(f"{prefix}-{i}.{subdomain}" for i in range(size))
    return Ranks(f"Kubernetes (Indexed Job, index {index})", index, size, hosts, _PORT)


def _of_jobset(environ: Mapping[str, str], index: int, counts: dict[str, int]) -> Ranks | None:
    role = environ[ROLE_VARIABLE]
    if index >= counts.get(role, 0):
        raise ClusterConfigError(
            f"This is pod {index} of the {role} tasks of a JobSet, but the layout has "
            f"{counts.get(role, 0)} of them. Set each Job's `completions` and `parallelism` to the "
            f"numbers of {LAYOUT_VARIABLE}. Received: {_INDEX}={index}, {ROLE_VARIABLE}={role}, "
            f"{LAYOUT_VARIABLE}={environ[LAYOUT_VARIABLE]}"
        )
    size, jobs = sum(counts.values()), list(counts)
    if size == 1:
        return None
    hosts = None
    if not environ.get(HOSTS_VARIABLE):
        prefix, subdomain = _names(environ, f"-{role}-0", index)
        hosts = tuple(
            f"{prefix}-{job}-0-{i}.{subdomain}" for job in jobs for i in range(counts[job])
        )
    rank = sum(counts[job] for job in jobs[: jobs.index(role)]) + index
    return Ranks(f"Kubernetes (JobSet, {role}-{index})", rank, size, hosts, _PORT)


def _names(environ: Mapping[str, str], of_job: str, index: int) -> tuple[str, str]:
    """Common prefix of all pods' names, and their subdomain."""
    name = environ.get("HOSTNAME") or socket.gethostname()
    ending = f"{of_job}-{index}"
    prefix = name.partition(".")[0].removesuffix(ending)
    if not prefix or prefix == name.partition(".")[0]:
        raise ClusterConfigError(
            f"The pod's host name does not end with {ending}, so the others' names are not known. "
            f"Leave `hostname` out of the pod template, or set {HOSTS_VARIABLE}. "
            f"Received: HOSTNAME={name}, {_INDEX}={index}"
        )
    subdomain = environ.get(SUBDOMAIN_VARIABLE) or socket.getfqdn(name).partition(".")[2]
    if not subdomain:
        raise ClusterConfigError(
            "The pods have no subdomain, so they cannot find each other by name. Make a headless "
            f"service, and set `subdomain` in the pod template, or {SUBDOMAIN_VARIABLE}, to its "
            f"name. Received: HOSTNAME={name} without a subdomain"
        )
    return prefix, subdomain
