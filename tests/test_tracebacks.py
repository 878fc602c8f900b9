"""What is shown of an exception that ends the process."""

import os
import sys

import keras
import pytest
import tensorflow as tf

from keras_psplus import tracebacks
from keras_psplus.all_reduce import PeerLostError
from keras_psplus.engine import Call

IN_KERAS = os.path.join(os.path.dirname(keras.__file__), "src", "made_up.py")
STACK = f"""Graph execution error:

Detected at node Add defined at (most recent call last):
  File "{IN_KERAS}", line 7, in train_step

  File "/home/me/train.py", line 3, in call

wrong shape
"""


def in_keras(function):
    """Calls a function from a frame that is one of Keras's."""
    names = {}
    exec(compile("def call(function):\n    function()\n", IN_KERAS, "exec"), names)
    names["call"](function)


def raised(function):
    try:
        in_keras(function)
    except Exception as error:
        return error


def own():
    raise ArithmeticError("mine")


def test_frames_of_libraries_are_left_out():
    text = tracebacks.folded(raised(own))
    head, note, *rest = text.splitlines()
    assert head == "Traceback (most recent call last):"
    assert note == (
        "  (1 frames of TensorFlow, Keras and keras_psplus are left out; "
        "KERAS_PSPLUS_FULL_TRACEBACK=1 shows them)"
    )
    assert "made_up.py" not in text and "in own" in text
    assert rest[-1] == "ArithmeticError: mine"


def test_an_error_of_libraries_alone_keeps_its_frames():
    error = raised(own)
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    error.__traceback__.tb_next = None
    assert "made_up.py" in tracebacks.folded(error)


def test_the_stack_in_a_message_of_tensorflow():
    def fail():
        raise tf.errors.InvalidArgumentError(None, None, STACK)

    text = tracebacks.folded(raised(fail))
    assert "made_up.py" not in text and "/home/me/train.py" in text
    assert text.rstrip().endswith("wrong shape")


def test_what_a_message_was_made_from_is_left_out():
    def fail():
        try:
            raise tf.errors.UnavailableError(None, None, STACK)
        except tf.errors.OpError as error:
            raise PeerLostError("worker-1 stopped answering. Received: wrong shape") from error

    text = tracebacks.folded(raised(fail))
    assert text.count("Traceback") == 1 and "Graph execution error" not in text
    assert text.rstrip().endswith("worker-1 stopped answering. Received: wrong shape")


def test_causes_of_the_users_are_shown():
    def fail():
        try:
            own()
        except ArithmeticError as error:
            raise KeyError("second") from error

    text = tracebacks.folded(raised(fail))
    assert text.index("ArithmeticError: mine") < text.index("KeyError: 'second'")
    assert text.count("are left out") == 1


@pytest.mark.parametrize("full", ["nothing", "variable", "keras"])
def test_all_frames_on_demand(full, monkeypatch, capsys):
    monkeypatch.delenv(tracebacks.FULL_VARIABLE, raising=False)
    if full == "variable":
        monkeypatch.setenv(tracebacks.FULL_VARIABLE, "1")
    if full == "keras":
        monkeypatch.setattr(keras.config, "is_traceback_filtering_enabled", lambda: False)
    error = raised(own)
    arguments = type(error), error, error.__traceback__
    tracebacks.UNCAUGHT.show(Call(sys.__excepthook__, arguments[0], arguments[1:]))
    assert ("made_up.py" in capsys.readouterr().err) == (full != "nothing")


def test_another_hook_stays(capsys):
    shown = []
    call = Call(lambda *args: shown.append(args), KeyError, (KeyError("x"), None))
    tracebacks.UNCAUGHT.show(call)
    assert [kind for kind, _, _ in shown] == [KeyError]
    assert capsys.readouterr().err == ""
