"""Shutdown messages of a chief to the tasks that serve it.

From outside, a chief that is done looks like one that was killed: its address stops answering. So
the chief greets its servers when it starts and sends a shutdown message at its end, each by one
operation on the server's device, which runs a function of the server's process there. A server that
was greeted and received no shutdown message knows that its chief has died.
"""

import atexit
import sys
import threading

import tensorflow as tf

from keras_psplus.tf_internals import script_ops

_TOKEN = "keras_psplus_chief_says"
_HELLO, _SHUTDOWN = "hello", "shutdown"
_SHUTDOWN_SECONDS = 3.0
_TRIES = 3


class ShutdownListener:
    """Receives, in a serving task, what its chief sends."""

    def __init__(self) -> None:
        self._received: set[str] = set()
        # TensorFlow makes up a token for each function, and the chief has to know this one's. Its
        # registry holds functions weakly.
        self._function = self._receive
        script_ops._py_funcs._funcs[_TOKEN] = self._function

    def _receive(self, word):
        self._received.add(word.decode())
        return True

    @property
    def has_chief_started(self) -> bool:
        """Whether a chief has sent anything."""
        return bool(self._received)

    @property
    def has_chief_left(self) -> bool:
        """Whether a chief has taken leave: it is about to end."""
        return _SHUTDOWN in self._received

    @property
    def is_chief_lost(self) -> bool:
        """Whether a chief that has ended since has greeted, but did not take leave."""
        return _HELLO in self._received and _SHUTDOWN not in self._received


class ShutdownNotifier:
    """Greets the servers, and takes leave of them when this process ends well.

    A script that ends by an exception does not end well.

    Args:
        devices: Names of one device of each server, by the server's task name.
    """

    def __init__(self, devices: dict[str, str]) -> None:
        self._devices = devices
        self._has_ended = threading.Event()
        self._has_failed = False
        self._send(_HELLO, devices.values())
        # At the interpreter's end no thread can be started any more.
        self._shutdown_thread = threading.Thread(
            target=self._send_shutdown, name="keras_psplus-shutdown"
        )
        self._shutdown_thread.daemon = True
        self._shutdown_thread.start()
        atexit.register(self._at_exit)

    def greet_again(self, task: str) -> None:
        """Greets a server that was started again."""
        self._send(_HELLO, [self._devices[task]])

    def note_failure(self) -> None:
        """Notes that this process is about to end, but not well."""
        self._has_failed = True

    def _at_exit(self):
        if getattr(sys, "last_value", None) is None and not self._has_failed:
            self._has_ended.set()
            # A server that hangs must not hold up the chief.
            self._shutdown_thread.join(_SHUTDOWN_SECONDS)

    def _send_shutdown(self):
        self._has_ended.wait()
        self._send(_SHUTDOWN, self._devices.values())

    def _send(self, word, devices):
        for device in devices:
            for _ in range(_TRIES):
                try:
                    with tf.device(device):
                        received = tf.raw_ops.PyFunc(
                            input=[tf.constant(word)], token=_TOKEN, Tout=[tf.bool]
                        )
                    received[0].numpy()  # operations on other tasks may return before they are done
                    break
                except tf.errors.UnavailableError:
                    continue  # it is busy, or has died
                except tf.errors.OpError:
                    break  # TensorFlow's own server runs there, without `serve`
