"""The list of hooks is what is replaced, and each of them asks an engine in a real fit."""

import importlib
import inspect
import json
import pathlib

import keras
import pytest

from keras_psplus import native
from keras_psplus.cli import main
from keras_psplus.core import gradient_path
from keras_psplus.engine import Engine
from keras_psplus.keras_hooks import HOOKS, hook
from tests.support.jobs import run_script

JOB = pathlib.Path(__file__).with_name("hooks_job.py")


# The files that a gradient passes, under int8 all-reduce, from the tape to the collectives and back
# to its variable. It comes from the tape to the optimizer, and then goes down and up again.
GRADIENT_PATH = {
    # The replica's gradient comes from the tape, by its fraction of the batch.
    "keras_hooks/hook.py",
    "all_reduce/engine.py",
    "core/batch/losses.py",
    "all_reduce/step/replica_step.py",
    "core/graph/stand_ins.py",
    # The optimizer is given it.
    "core/gradient_path.py",
    "engine.py",
    # The sums are those of this optimizer on this replica, by buckets and methods.
    "all_reduce/reducers.py",
    "all_reduce/reduction/methods.py",
    # Each piece is encoded, with what is left of it, and packed into words.
    "compression/quantize.py",
    "compression/error_feedback.py",
    "compression/wire.py",
    "all_reduce/reduction/replica_states.py",
    # TensorFlow's collectives, of several small tensors at once.
    "all_reduce/collectives/hop.py",
    "all_reduce/collectives/operations.py",
}
HOOKS_OF_GRADIENTS = [
    "gradient",
    "apply",
    "_backend_apply_gradients",
    "_backend_update_step",
]


def run_job(*args):
    lines = run_script(JOB, *args, timeout=300, may_show_errors=True).splitlines()
    return [json.loads(line.removeprefix("found ")) for line in lines if line.startswith("found ")]


@pytest.mark.processes
def test_what_is_replaced_is_in_the_list_and_nothing_else():
    ((by_import, by_strategy, listed),) = run_job("--replaced")
    assert by_import == []
    assert by_strategy == listed


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.skipif(native.kernels() is None, reason="no C++ compiler, or a GPU: other encoders")
def test_files_that_a_gradient_passes():
    ((functions, hooks),) = run_job("--gradient")
    assert set(functions) == GRADIENT_PATH, functions
    assert len(GRADIENT_PATH) <= 15
    assert hooks == HOOKS_OF_GRADIENTS


def test_no_name_is_replaced_twice():
    names = [one.where for one in HOOKS]
    assert len(set(names)) == len(names)


@pytest.mark.processes
def test_each_hook_asks_an_engine_in_a_real_fit():
    (on_devices,), (with_servers,) = run_job(), run_job("--servers")
    assert {one.where for one in HOOKS} <= {*on_devices, *with_servers}


def engines(kind=Engine):
    yield kind
    for subclass in kind.__subclasses__():
        yield from engines(subclass)


def public(kind):
    return {name for name, value in vars(kind).items() if callable(value) and name[0] != "_"}


def test_an_engine_has_few_methods_each_of_which_is_asked():
    methods = public(Engine)
    assert len(methods) <= 20
    source = inspect.getsource(gradient_path)
    assert all(
        f"engine.{name}(" in source or name in {one.ask for one in HOOKS} or name == "on"
        for name in methods
    )
    # Others have an object of their own to ask.
    of_keras = [one for one in HOOKS if one.where.startswith("keras.") and isinstance(one.ask, str)]
    assert {one.ask for one in of_keras} - methods == {"show_message"}


def test_engines_answer_calls_that_hooks_make():
    names = {one.call or one.name for one in HOOKS}
    # Asked for by Keras's epochs, and by the layer `DynamicEmbedding`.
    names |= {"steps_end", "test_steps_end", "make_table"}
    for package in ("all_reduce", "parameter_server", "hybrid", "pipeline", "sharding"):
        importlib.import_module(f"keras_psplus.{package}.engine")
    importlib.import_module("keras_psplus.hybrid.engine")
    for engine in engines():
        if engine.__module__.startswith("keras_psplus."):
            assert set(engine._answers) <= names
            # A chain: the strategy's own, those that it has in common with others, the base.
            assert sum(issubclass(base, Engine) for base in engine.__bases__) <= 1


def test_the_base_class_names_each_call():
    names = {f"`{one.call}`" for one in HOOKS} - {"``"}
    text = "".join(getattr(Engine, method).__doc__ for method in public(Engine))
    assert not [name for name in names if name not in text]


def test_doctor_lists_the_hooks(capsys):
    assert main.main(["doctor", "--hooks"]) == 0
    out = capsys.readouterr().out
    assert all(f"{one.where} " in out and one.why in out for one in HOOKS)
    assert main.main(["doctor", "--hooks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [one.where for one in HOOKS]
    assert all(row["fits"] for row in rows)


def test_doctor_names_what_does_not_fit(capsys, monkeypatch):
    class Renamed:
        pass

    gone = hook.Hook(Renamed, "fit(self, x)", lambda: None, "train", "to test")
    monkeypatch.setattr("keras_psplus.keras_hooks.HOOKS", (gone,))
    assert main.main(["doctor", "--hooks", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["found"] is None and "Renamed.fit" in row["problem"]
    assert keras.__version__ in row["problem"]
    assert main.main(["doctor", "--hooks"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_json_goes_with_hooks(capsys):
    assert main.main(["doctor", "--json"]) == 2
    assert "--hooks" in capsys.readouterr().err
