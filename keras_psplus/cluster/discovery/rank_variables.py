"""Launchers that set a rank and a number of ranks: torchrun and MPI.

They do not give every process the others' hosts, which MPI and `torch.distributed` exchange
themselves. Processes on one host need none; otherwise `KERAS_PSPLUS_HOSTS` lists the hosts, or
under torchrun the processes contact the first one, at MASTER_ADDR (`rendezvous`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from keras_psplus.cluster.discovery.ranks import Ranks, number, port_of_job, read_pair

TORCHRUN, MPI = "torchrun", "mpi"
_MPI = (
    # Rank, size, local size, name of the job; launcher.
    (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("PMIX_NAMESPACE", "Open MPI's mpirun"),
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "PMI_ID", "mpiexec (PMI)"),
)


def read_torchrun(environ: Mapping[str, str]) -> Ranks | None:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    Returns:
        The processes; None if RANK and WORLD_SIZE are not set, or there is one process.
    """
    pair = read_pair(environ, "RANK", "WORLD_SIZE", "torchrun")
    if pair is None or pair[1] == 1:
        return None
    # The port itself is the launcher's.
    port = number("MASTER_PORT", environ.get("MASTER_PORT", "29500"), 1, 65_534) + 1
    hosts, local = None, _local_size(environ, "LOCAL_WORLD_SIZE")
    first = environ.get("MASTER_ADDR") or None
    if local == pair[1] and first:
        hosts = (first,) * pair[1]
    return Ranks("RANK and WORLD_SIZE (torchrun)", *pair, hosts, port, local, first)


def read_mpi(environ: Mapping[str, str]) -> Ranks | None:
    """Reads what Open MPI's `mpirun`, or a launcher that speaks PMI, has set.

    Returns:
        The processes; None if nothing is set, or there is one process.
    """
    for rank, size, local, name, launcher in _MPI:
        pair = read_pair(environ, rank, size, launcher)
        if pair is not None and pair[1] > 1:
            # Names differ from job to job.
            job = zlib.crc32(environ.get(name, "").encode())
            port = port_of_job(job)
            return Ranks(launcher, *pair, None, port, _local_size(environ, local))
    return None


def _local_size(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return number(name, text, 1) if text else None
