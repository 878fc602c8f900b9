"""The pods of an Indexed Job, by what Kubernetes says to each.

Reference: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/. Pods of an
Indexed Job with a headless service are `JOB-INDEX.SUBDOMAIN`. How many there are no pod is told:
`KERAS_PSPLUS_LAYOUT` says it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.layout import LAYOUT_VARIABLE, parse
from keras_psplus.cluster.ranks import HOSTS_VARIABLE, Ranks, number

NAME = "kubernetes"
SUBDOMAIN_VARIABLE = "KERAS_PSPLUS_SUBDOMAIN"
_INDEX = "JOB_COMPLETION_INDEX"
_PORT = 2222


def read(environ: Mapping[str, str]) -> Ranks | None:
    """Reads the variables of an Indexed Job's pod; None outside of one, and of a single pod.

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
    size = sum(parse(environ[LAYOUT_VARIABLE]).values())
    if index >= size:
        raise ClusterConfigError(
            f"This is pod {index} of a Kubernetes Indexed Job, but the layout has {size} tasks. "
            f"Set the Job's `completions` and `parallelism` to {size}, or change {LAYOUT_VARIABLE}."
            f" Received: {_INDEX}={index}, {LAYOUT_VARIABLE}={environ[LAYOUT_VARIABLE]}"
        )
    if size == 1:
        return None
    hosts = None if environ.get(HOSTS_VARIABLE) else _hosts(environ, index, size)
    return Ranks(f"Kubernetes (Indexed Job, index {index})", index, size, hosts, _PORT)


def _hosts(environ, index, size):
    name = environ.get("HOSTNAME") or socket.gethostname()
    prefix, dash, last = name.partition(".")[0].rpartition("-")
    if not dash or last != str(index):
        raise ClusterConfigError(
            "The pod's host name does not end with its index, so the others' names are not known. "
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
    return tuple(f"{prefix}-{i}.{subdomain}" for i in range(size))
