"""How kernels come to a machine, and what becomes of one that has no compiler."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from keras_psplus import native
from keras_psplus.native import compiler as builder
from tests.endings import wait_for_end

FAKE = """#!/bin/sh
echo one >> {calls}
while [ $# -gt 1 ]; do [ "$1" = -o ] && made=$2; shift; done
sleep {seconds}
echo it says so >&2
{end}
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes a compiler that writes down its calls, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(end, seconds=0.1):
        path, calls = tmp_path / "compiler", tmp_path / "calls"
        path.write_text(FAKE.format(calls=calls, end=end, seconds=seconds))
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return lambda: calls.read_text().count("one") if calls.exists() else 0

    return make


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="they are not for GPUs")
@pytest.mark.skipif(not any(map(shutil.which, builder._COMPILERS)), reason="no C++ compiler")
def test_where_there_is_a_compiler_there_are_kernels(monkeypatch):
    for variable in ("CXX", "KERAS_PSPLUS_NATIVE"):
        monkeypatch.delenv(variable, raising=False)
    assert native.kernels() is not None, native.state()


def test_it_is_compiled_once(compiler):
    calls = compiler('echo library > "$made"')
    library = builder.build()
    assert library.read_text() == "library\n" and calls() == 1
    assert builder.build() == library and calls() == 1
    # Nothing else is left there.
    assert sorted(path.name for path in library.parent.iterdir()) == ["kernels.so", "lock"]


def test_of_several_processes_one_compiles(compiler):
    # Long enough for all to have come.
    calls = compiler('echo library > "$made"', seconds=5)
    script = "from keras_psplus.native.compiler import build; print(build())"
    jobs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {job.communicate(timeout=120)[0].splitlines()[-1] for job in jobs}
    assert len(paths) == 1 and calls() == 1


def test_who_finds_it_needs_neither_a_compiler_nor_to_write(compiler, monkeypatch):
    compiler('echo library > "$made"')
    library = builder.build()
    (library.parent / "lock").unlink()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(builder, "_alone", lambda folder: pytest.fail("nothing is to be written"))
    assert builder.build() == library


def test_a_compiler_may_have_arguments(compiler, monkeypatch, tmp_path):
    calls = compiler("for word; do :; done; exit 1")
    command = f"env 'LANG=of others' {os.environ['CXX']} -first"
    monkeypatch.setenv("CXX", command)
    with pytest.raises(builder.BuildError, match=f"^{shutil.which('env')} has failed"):
        builder.build()
    (log,) = _logs()
    assert f"env 'LANG=of others' {tmp_path}/compiler -first /" in log.read_text() and calls() == 1
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(builder.BuildError, match="CXX cannot be read: .* Received: 'g"):
        builder.build()


def test_a_compiler_that_fails_is_not_tried_again_for_a_day(compiler):
    calls = compiler("exit 3")
    message = r"failed: see .*/failed-\w{16}\.log; remove it"
    for _ in range(2):
        with pytest.raises(builder.BuildError, match=message):
            builder.build()
    assert calls() == 1
    (log,) = _logs()
    assert "it says so" in log.read_text() and "largest.cc" in log.read_text()
    yesterday = time.time() - 24 * 3600 - 1
    for again, wait in enumerate((log.unlink, lambda: os.utime(log, (yesterday, yesterday))), 2):
        wait()
        with pytest.raises(builder.BuildError):
            builder.build()
        assert calls() == again


def test_a_compiler_that_was_replaced_is_tried(compiler):
    compiler("exit 3")
    with pytest.raises(builder.BuildError):
        builder.build()
    compiler('echo library > "$made"')
    assert builder.build().exists()


def test_a_compiler_that_hangs_is_ended_with_its_children(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "_TIMEOUT", 2)
    compiler(f"sleep 100 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(builder.BuildError, match="failed"):
        builder.build()
    (log,) = _logs()
    assert "not done after 2 s" in log.read_text() and "it says so" in log.read_text()
    wait_for_end(int((tmp_path / "child").read_text()))


def test_without_sources_nothing_is_made(compiler, monkeypatch):
    compiler('echo library > "$made"')
    monkeypatch.setattr(builder, "_SOURCES", ())
    with pytest.raises(builder.BuildError, match="sources were not installed"):
        builder.build()


def _logs():
    return list(builder.cache_folder().glob("*/failed-*.log"))


def test_another_process_that_never_ends_is_not_waited_for(compiler, monkeypatch):
    compiler("exit 1")
    monkeypatch.setattr(builder, "_TIMEOUT", -9)
    with builder._alone(_made(builder.cache_folder())):
        with pytest.raises(builder.BuildError, match="another process has been compiling"):
            with builder._alone(builder.cache_folder()):
                pass


def _made(folder):
    folder.mkdir(parents=True)
    return folder


def _no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("broken", ["no compiler", "no folder", "no home", "no library"])
def test_without_kernels_there_are_none_and_the_reason_is_said(broken, compiler, monkeypatch):
    compiler('echo library > "$made"')
    if broken == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        reason = "no C\\+\\+ compiler \\(no-such-compiler\\)"
    elif broken == "no folder":
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
        reason = "cannot be used"
    elif broken == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(builder.pathlib.Path, "home", _no_home)
        reason = "no folder for them: .*set XDG_CACHE_HOME"
    else:
        reason = "file too short|invalid ELF"
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    said = []
    monkeypatch.setattr(native, "info_once", lambda line, *args: said.append(line % args))
    monkeypatch.setattr(native.tf.config, "list_logical_devices", lambda kind: [])
    assert native.kernels() is None
    assert len(said) == 1 and re.search(f"slower: none: .*({reason})", said[0])
    assert re.match(f"none: .*({reason})", native.state())


def test_the_environment_can_do_without(monkeypatch):
    monkeypatch.setenv("KERAS_PSPLUS_NATIVE", "0")
    monkeypatch.setattr(native, "_loaded", lambda: pytest.fail("not to be compiled"))
    assert native.kernels() is None
    assert native.state() == "not used: KERAS_PSPLUS_NATIVE=0"


def test_there_are_none_for_gpus(monkeypatch):
    monkeypatch.delenv("KERAS_PSPLUS_NATIVE", raising=False)
    monkeypatch.setattr(native, "_loaded", lambda: pytest.fail("not to be compiled"))
    monkeypatch.setattr(native.tf.config, "list_logical_devices", lambda kind: [f"{kind}:0"])
    assert native.kernels() is None
    assert native.state() == "not used: there are GPUs"
