"""Runs a dispatcher and two workers of the tf.data service until its standard input is closed.

Prints the dispatcher's address.
"""

import sys

from tests import quick_start  # noqa: F401

# isort: split
import tensorflow as tf

service = tf.data.experimental.service
dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
workers = [
    service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=dispatcher.target.split("://")[1], heartbeat_interval_ms=200
        )
    )
    for _ in range(2)
]
print(dispatcher.target, flush=True)
sys.stdin.read()
