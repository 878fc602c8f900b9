"""How a chief tells the tasks that serve it that it ends well.

From outside, a chief that is done looks like one that was killed: its address stops answering. So
the chief greets its servers when it starts and takes leave of them at its end, each by one
operation on the server's device, which runs a function of the server's own process there. A server
that was greeted and got no farewell knows that its chief has died.
"""

import atexit
import sys
import threading

import tensorflow as tf
from tensorflow.python.ops import script_ops

_TOKEN = "keras_psplus_chief_says"
_HELLO, _FAREWELL = "hello", "farewell"
_FAREWELL_SECONDS = 3.0
_TRIES = 3


class Ear:
    """Hears, in a serving task, what its chief says."""

    def __init__(self):
        self._said = set()
        # TensorFlow makes up a token for each function, and the chief has to know this one's. Its
        # registry holds functions weakly.
        self._function = self._hear
        script_ops._py_funcs._funcs[_TOKEN] = self._function

    def _hear(self, word):
        self._said.add(word.decode())
        return True

    @property
    def has_heard(self):
        """Whether a chief has said anything."""
        return bool(self._said)

    @property
    def lost_its_chief(self):
        """Whether a chief that has ended since has greeted, but did not take leave."""
        return _HELLO in self._said and _FAREWELL not in self._said


class Chief:
    """Greets the servers, and takes leave of them when this process ends well.

    A script that ends by an exception does not end well.

    Args:
        devices: Names of one device of each server, by the server's task name.
    """

    def __init__(self, devices):
        self._devices = devices
        self._ends = threading.Event()
        self._ends_badly = False
        self._say(_HELLO, devices.values())
        # At the interpreter's end no thread can be started any more.
        self._leaver = threading.Thread(target=self._leave, name="keras_psplus-farewell")
        self._leaver.daemon = True
        self._leaver.start()
        atexit.register(self._at_exit)

    def greet_again(self, task):
        """Greets a server that was started again."""
        self._say(_HELLO, [self._devices[task]])

    def note_bad_end(self):
        """Notes that this process is about to end, but not well."""
        self._ends_badly = True

    def _at_exit(self):
        if getattr(sys, "last_value", None) is None and not self._ends_badly:
            self._ends.set()
            # A server that hangs must not hold up the chief.
            self._leaver.join(_FAREWELL_SECONDS)

    def _leave(self):
        self._ends.wait()
        self._say(_FAREWELL, self._devices.values())

    def _say(self, word, devices):
        for device in devices:
            for _ in range(_TRIES):
                try:
                    with tf.device(device):
                        heard = tf.raw_ops.PyFunc(
                            input=[tf.constant(word)], token=_TOKEN, Tout=[tf.bool]
                        )
                    heard[0].numpy()  # operations on other tasks may return before they are done
                    break
                except tf.errors.UnavailableError:
                    continue  # it is busy, or has died
                except tf.errors.OpError:
                    break  # TensorFlow's own server runs there, without `serve`
