"""Waits for the other tasks before TensorFlow does, which would wait without limit or word."""

import concurrent.futures
import sys
import time
from collections.abc import Callable, Collection

from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel.sessions import JobSecret
from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.handshake import PeerIdentity
from keras_psplus.cluster.startup.local_address import (
    DNS_PATIENCE,
    check_own_address,
    listen_on_own_address,
)
from keras_psplus.cluster.startup.peer_discovery import PeerDiscovery, SparsePeerDiscovery, is_large


def wait_for_cluster(
    config: TaskConfig,
    job_types: Collection[str] = ("chief", "worker"),
    timeout: float = 300.0,
    log: Callable[[str], None] | None = None,
    all_wait: bool = False,
    spare_workers: int = 0,
) -> set[str]:
    """Waits until every other task of the given jobs can be reached.

    To be called before TensorFlow starts its gRPC server: this task's own
    address is bound and answered meanwhile, and is free again afterwards. A
    task counts as here once it accepts a connection, be it in its own
    `wait_for_cluster` or in TensorFlow's server.

    In a large cluster whose tasks all wait for each other (`all_wait`), the
    first one calls all others, and tells them once it has found them; each of
    those calls the first one and some neighbours.

    Example:

    ```python
    config = read_task_config()
    wait_for_cluster(config, timeout=60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    ```

    Args:
        config: This process's `TaskConfig`.
        job_types: The jobs whose tasks to wait for.
        timeout: Seconds to wait.
        log: Function that takes a line of progress; writes to stderr by
            default.
        all_wait: Whether all tasks of `job_types` call this function.
        spare_workers: How many workers may be missing, if not `all_wait`.

    Returns:
        Names of the workers that are missing.

    Raises:
        ClusterStartupError: If this task's address cannot be used, a peer has
            another cluster or the same task, or tasks are missing after
            `timeout` seconds (the message lists who is here and who is not).
    """
    if config.address is None:  # an evaluator runs beside the cluster
        return set()
    log = log or _log
    started = time.monotonic()
    mine, job = PeerIdentity.of(config), JobSecret.of(config)
    listener = listen_on_own_address(config, mine, min(timeout, DNS_PATIENCE), log)
    tasks = [task for task in config.tasks() if task[0] in job_types]
    kind = SparsePeerDiscovery if all_wait and is_large(len(tasks)) else PeerDiscovery
    discovery = kind(config, mine, job, listener, job_types)
    try:
        discovery.call(started, timeout, log, spare_workers)
    finally:
        listener.close()
    return discovery.missing


def check_local_address(config: TaskConfig, log: Callable[[str], None] | None = None) -> None:
    """Checks that this task's own address can be bound.

    Args:
        log: As for `wait_for_cluster`.

    Raises:
        ClusterStartupError: If another process holds the port, or the address
            is not this machine's.
    """
    check_own_address(config, PeerIdentity.of(config), 0.0, log or _log)


def probe_peers(config: TaskConfig, timeout: float = 3.0) -> dict[str, str | None]:
    """Tries to connect to every other task once.

    Args:
        timeout: Seconds that one connection may take.

    Returns:
        Dict from task name to `None` (reachable) or the reason why not.
    """

    def probe(address: str) -> str | None:
        try:
            handshake.connect(address, timeout).close()
        except OSError as error:
            return str(error)
        return None

    peers = config.peers()
    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
        reasons = list(pool.map(probe, [address for _, _, address in peers]))
    return {
        task_name(job, index): reason
        for (job, index, _), reason in zip(peers, reasons, strict=True)
    }


def _log(line: str) -> None:
    print(f"keras_psplus: {line}", file=sys.stderr, flush=True)
