"""A task of a cluster that stays up: runs cases, one after the other, as pytest asks for them.

worker.py LAYOUT SOCKET

Each request is a line of JSON on the socket: the case's module and name, its arguments, and the
file that its results go into. Tasks that serve others stay where they make the strategy.
"""

import contextlib
import faulthandler
import gc
import importlib
import inspect
import json
import os
import pathlib
import signal
import socket
import sys
import traceback
from unittest import mock

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

from tests.support import graphs
from tests.support.layouts import LAYOUTS

# Containers of the library in which a case leaves something for the next one.
_CONTAINERS = (
    ("log", "_logged"),
    ("core.backup.fit_progress", "_BY_FOLDER"),
    ("core.backup.store", "_kept"),
    ("files.ownership", "_owned"),
    ("tables.local", "_engines"),
)
# Marks that the job is lost; no case can run after one.
_LOST = (
    ("core.jobs.failure", "_failed_at"),
    ("core.jobs.failure", "_has_failed"),
    ("core.jobs.failure", "_reported_at"),
)


def main(layout, path):
    # The log of a task that crashes or hangs shows where.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    graphs.run_as_traced()
    strategy = LAYOUTS[layout].make()
    task = getattr(strategy, "task", None)
    name = task.name if task is not None else LAYOUTS[layout].tasks[0]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    stream = connection.makefile("rw")
    _say(stream, {"task": name})
    for line in stream:
        request = json.loads(line)
        print(f"case {request['case']} {request['args']}", flush=True)
        _say(stream, _answer(strategy, request, name))


def _say(stream, what):
    stream.write(json.dumps(what) + "\n")
    stream.flush()


def _answer(strategy, request, task):
    before = dict(os.environ), os.getcwd()
    try:
        module = importlib.import_module(request["module"])
        function = module
        for part in request["case"].split("."):
            function = getattr(function, part)
        keras.utils.set_random_seed(1)
        scope = strategy.scope if strategy else contextlib.nullcontext
        if "strategy" in inspect.signature(function).parameters:
            found = function(strategy, **request["args"])
        elif getattr(function, "makes_scope", False):
            found = function(scope, **request["args"])
        else:
            with scope():
                found = function(**request["args"])
        np.savez(request["file"].format(task=task), **_arrays(found))
        answer = {"error": None}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    found = function = None
    _forget(*before)
    return answer | {"lost": [path for path, name in _LOST if _of(path, name)]}


def _arrays(found):
    """The arrays of a case that returns a dict, or a model (or None) and a dict."""
    if isinstance(found, tuple):
        model, found = found
        weights = model.get_weights() if model is not None else []
        found = found | {f"weights/{i}": w for i, w in enumerate(weights)}
    return {name: np.asarray(value) for name, value in (found or {}).items()}


def _of(path, name):
    module = sys.modules.get(f"keras_psplus.{path}")
    return getattr(module, name) if module else None


def _forget(environ, folder):
    """Makes the process as it was before a case."""
    mock.patch.stopall()
    # Only what differs: TensorFlow's threads read the environment meanwhile, and may crash.
    for variable in os.environ.keys() - environ.keys():
        del os.environ[variable]
    for variable, value in environ.items():
        if os.environ.get(variable) != value:
            os.environ[variable] = value
    os.chdir(folder)
    keras.utils.clear_session()
    keras.utils.get_custom_objects().clear()
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    keras.config.set_epsilon(1e-7)
    keras.config.set_image_data_format("channels_last")
    tf.config.run_functions_eagerly(False)
    tf.random.set_seed(None)
    for path, name in _CONTAINERS:
        (_of(path, name) or set()).clear()
    # On all tasks alike: what variables leave is released by all of them together.
    gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], str(pathlib.Path(sys.argv[2])))
