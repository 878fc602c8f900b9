"""How kernels come to a machine, and what becomes of one that has no compiler."""

import re
import subprocess
import sys

import pytest

from keras_psplus import native
from keras_psplus.native import compiler as builder

FAKE = """#!/bin/sh
echo one >> {calls}
while [ $# -gt 1 ]; do [ "$1" = -o ] && made=$2; shift; done
sleep 0.5
echo it says so >&2
{end}
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes a compiler that writes down its calls, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(end):
        path, calls = tmp_path / "compiler", tmp_path / "calls"
        path.write_text(FAKE.format(calls=calls, end=end))
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return lambda: calls.read_text().count("one") if calls.exists() else 0

    return make


def test_it_is_compiled_once(compiler):
    calls = compiler('echo library > "$made"')
    library = builder.build()
    assert library.read_text() == "library\n" and calls() == 1
    assert builder.build() == library and calls() == 1
    # Nothing else is left there.
    assert sorted(path.name for path in library.parent.iterdir()) == ["kernels.so", "lock"]


def test_of_several_processes_one_compiles(compiler):
    calls = compiler('echo library > "$made"')
    script = "from keras_psplus.native.compiler import build; print(build())"
    jobs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {job.communicate(timeout=120)[0].splitlines()[-1] for job in jobs}
    assert len(paths) == 1 and calls() == 1


def test_a_compiler_that_fails_is_not_tried_again(compiler):
    calls = compiler("exit 3")
    for _ in range(2):
        with pytest.raises(builder.BuildError, match="failed: see .*failed.log; remove it"):
            builder.build()
    assert calls() == 1
    (log,) = builder.cache_folder().glob("*/failed.log")
    assert "it says so" in log.read_text() and "largest.cc" in log.read_text()
    log.unlink()
    with pytest.raises(builder.BuildError):
        builder.build()
    assert calls() == 2


def test_a_compiler_that_hangs_is_ended(compiler, monkeypatch):
    monkeypatch.setattr(builder, "_TIMEOUT", 1)
    compiler("exec sleep 100")
    with pytest.raises(builder.BuildError, match="failed"):
        builder.build()
    (log,) = builder.cache_folder().glob("*/failed.log")
    assert "not done after 1 s" in log.read_text()


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
