"""How kernels come to a machine, and what becomes of one that has no compiler."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from keras_psplus import native
from tests import warm
from tests.endings import wait_for_end

FAKE = """#!/bin/sh
for word; do :; done
[ "$word" = --version ] && echo version {version} && exit
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

    def make(end, seconds=0.1, version=1):
        path, calls = tmp_path / "compiler", tmp_path / "calls"
        path.write_text(FAKE.format(calls=calls, end=end, seconds=seconds, version=version))
        native._version.cache_clear()
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return lambda: calls.read_text().count("one") if calls.exists() else 0

    return make


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="they are not for GPUs")
@pytest.mark.skipif(not any(map(shutil.which, native._COMPILERS)), reason="no C++ compiler")
def test_where_there_is_a_compiler_there_are_kernels(monkeypatch):
    for variable in ("CXX", "KERAS_PSPLUS_NATIVE"):
        monkeypatch.delenv(variable, raising=False)
    assert native.kernels() is not None, native.state()


def test_it_is_compiled_once(compiler):
    calls = compiler('echo library > "$made"')
    library = native.build()
    assert library.read_text() == "library\n" and calls() == 1
    assert native.build() == library and calls() == 1
    # Nothing else is left there.
    names = ["kernels.so", "kernels.so.sha256", "lock"]
    assert sorted(path.name for path in library.parent.iterdir()) == names


def test_of_several_processes_one_compiles(compiler, tmp_path):
    waits = f"while [ $(ls {tmp_path} | grep -c here) -lt 3 ]; do sleep 0.1; done; sleep 0.5"
    calls = compiler(f'{waits}; echo library > "$made"')
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib; from keras_psplus import log\n"
        "from keras_psplus.native import build\n"
        f"log.show(); pathlib.Path({str(tmp_path)!r}, f'here-{{os.getpid()}}').touch()\n"
        "print(build())\n"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    jobs = [warm.Popen([sys.executable, script], **streams) for _ in range(3)]
    ends = [job.communicate(timeout=560) for job in jobs]
    assert len({out.splitlines()[-1] for out, _ in ends}) == 1 and calls() == 1
    said = [err.count("keras_psplus: compiling C++ kernels into") for _, err in ends]
    assert sorted(said) == [0, 0, 1]


def test_who_finds_it_needs_neither_a_compiler_nor_to_write(compiler, monkeypatch):
    compiler('echo library > "$made"')
    library = native.build()
    (library.parent / "lock").unlink()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "_alone", lambda *_: pytest.fail("nothing is to be written"))
    assert native.build() == library


def test_a_compiler_may_have_arguments(compiler, monkeypatch, tmp_path):
    calls = compiler("for word; do :; done; exit 1")
    command = f"env 'LANG=of others' {os.environ['CXX']} -first"
    monkeypatch.setenv("CXX", command)
    with pytest.raises(native.BuildError, match=f"^{shutil.which('env')} has failed"):
        native.build()
    (log,) = _logs()
    assert f"env 'LANG=of others' {tmp_path}/compiler -first /" in log.read_text() and calls() == 1
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(native.BuildError, match="CXX cannot be read: .* Received: 'g"):
        native.build()


def test_a_compiler_that_fails_is_not_tried_again_for_a_day(compiler):
    calls = compiler("exit 3")
    message = r"failed: see .*/failed-\w{16}\.log; remove it"
    for _ in range(2):
        with pytest.raises(native.BuildError, match=message):
            native.build()
    assert calls() == 1
    (log,) = _logs()
    assert "it says so" in log.read_text() and "largest.cc" in log.read_text()
    yesterday = time.time() - 24 * 3600 - 1
    for again, wait in enumerate((log.unlink, lambda: os.utime(log, (yesterday, yesterday))), 2):
        wait()
        with pytest.raises(native.BuildError):
            native.build()
        assert calls() == again


def test_a_compiler_that_was_replaced_is_tried(compiler):
    compiler("exit 3")
    with pytest.raises(native.BuildError):
        native.build()
    compiler('echo library > "$made"')
    assert native.build().exists()


def test_a_compiler_that_hangs_is_ended_with_its_children(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_TIMEOUT", 1)
    compiler(f"sleep 100 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(native.BuildError, match="failed"):
        native.build()
    (log,) = _logs()
    assert "not done after 1 s" in log.read_text() and "it says so" in log.read_text()
    wait_for_end(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no digest"])
def test_a_damaged_library_is_compiled_again(damage, compiler):
    calls = compiler('echo library > "$made"')
    library = native.build()
    if damage == "no digest":
        (library.parent / "kernels.so.sha256").unlink()
    else:
        library.write_bytes(b"" if damage == "truncated" else b"l\xffbrary\n")
    with pytest.raises(OSError, match="is damaged"):
        native.opened(library)
    assert native.build() == library and calls() == 2
    assert _text_of(native.opened(library)) == "library\n"


def test_what_was_checked_is_what_is_loaded(compiler):
    compiler('echo library > "$made"')
    library = native.build()
    file = native.opened(library)
    shutil.move(library.parent, library.parent.with_name("away"))
    library.parent.mkdir()
    library.write_text("another")
    assert _text_of(file) == "library\n"


def _text_of(descriptor):
    with os.fdopen(descriptor) as file:
        return file.read()


def _linked(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _writable(path):
    path.chmod(path.stat().st_mode | 0o002)


def _replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("place", "change", "reason"),
    [
        ("kernels.so", _linked, "kernels.so is a symbolic link"),
        ("kernels.so", _writable, "others can write to .*kernels.so; .*Received: mode 0o602"),
        ("kernels.so", _replaced_by_a_pipe, "kernels.so is of another kind"),
        ("kernels.so.sha256", _linked, "kernels.so.sha256 is a symbolic link"),
        (".", _linked, r"\w{16} is a symbolic link"),
        (".", _writable, r"others can write to .*\w{16}; .*Received: mode 0o702"),
        ("..", _linked, "keras_psplus is a symbolic link"),
        ("..", _writable, "others can write to .*keras_psplus; .*Received: mode 0o702"),
        ("../..", _writable, "others can write to .*cache; .*Received: mode 0o702"),
    ],
)
def test_what_others_could_have_written_is_not_used(place, change, reason, compiler):
    calls = compiler('echo library > "$made"')
    library = native.build()
    change(pathlib.Path(os.path.normpath(library.parent / place)))
    with pytest.raises(native.BuildError, match=f"cannot be used: .*{reason}"):
        native.build()
    with pytest.raises(OSError, match=reason):
        native.opened(library)
    # Nor is it replaced.
    assert calls() == 1


def test_what_belongs_to_others_is_not_used(compiler, monkeypatch):
    compiler('echo library > "$made"')
    library = native.build()
    monkeypatch.setattr(native, "owners", lambda: {os.geteuid() + 1})
    reason = f"belongs to another user; .*Received: owner {os.geteuid()}"
    with pytest.raises(native.BuildError, match=reason):
        native.build()
    with pytest.raises(OSError, match=reason):
        native.opened(library)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_library_of_another_user_is_not_used(compiler):
    compiler('echo library > "$made"')
    library = native.build()
    os.chown(library, 4242, -1)
    with pytest.raises(native.BuildError, match="kernels.so belongs to another user; .* 4242"):
        native.build()


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_umask_has_no_say(umask, compiler, monkeypatch, tmp_path):
    compiler('echo library > "$made"')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(umask)
    try:
        library = native.build()
    finally:
        os.umask(before)
    for path in (library.parent, *list(library.parents)[1:4]):
        assert path.stat().st_mode & 0o777 == 0o700, path
    for path in library.parent.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert native.build() == library


def test_a_relative_cache_folder_is_ignored(compiler, monkeypatch, tmp_path):
    compiler('echo library > "$made"')
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert native.build().is_relative_to(tmp_path / "home" / ".cache" / "keras_psplus")
    monkeypatch.setenv("HOME", "home")
    with pytest.raises(native.BuildError, match="set XDG_CACHE_HOME"):
        native.build()
    assert not (tmp_path / "cache").exists()


def test_another_compiler_or_c_library_has_kernels_of_its_own(compiler, monkeypatch):
    compiler('echo first > "$made"')
    libraries = [native.build()]
    compiler('echo second > "$made"', version=2)
    libraries.append(native.build())
    monkeypatch.setattr(os, "confstr", lambda name: f"{name} of another version")
    libraries.append(native.build())
    texts = ["first\n", "second\n", "second\n"]
    assert len(set(libraries)) == 3 and [path.read_text() for path in libraries] == texts


def test_those_of_another_compiler_are_better_than_none(compiler):
    compiler('echo library > "$made"')
    library = native.build()
    compiler("exit 1", version=2)
    assert native.build() == library
    library.write_text("")
    with pytest.raises(native.BuildError, match="failed"):
        native.build()


def test_without_sources_nothing_is_made(compiler, monkeypatch):
    compiler('echo library > "$made"')
    monkeypatch.setattr(native, "_SOURCES", ())
    with pytest.raises(native.BuildError, match="sources were not installed"):
        native.build()


def _logs():
    return list(native.cache_folder().glob("*/failed-*.log"))


def test_another_process_that_never_ends_is_not_waited_for(compiler, monkeypatch):
    compiler("exit 1")
    said = set()
    monkeypatch.setattr(native, "info_once", lambda line, *args: said.add(line % args))
    monkeypatch.setattr(native, "_TIMEOUT", -9)
    path = native.cache_folder() / "key"
    with native.Folder(path, make=True) as folder, native._alone(folder, path):
        with pytest.raises(native.BuildError, match="another process has been compiling"):
            with native._alone(folder, path):
                pass
    # It does not stand still without a line.
    assert said == {f"waiting for another process, which compiles C++ kernels into {path}"}


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
        monkeypatch.setattr(native.pathlib.Path, "home", _no_home)
        reason = "no folder for them: .*set XDG_CACHE_HOME"
    else:
        reason = "file too short|invalid ELF"
    monkeypatch.setattr(native, "_loaded", native._load.__wrapped__)
    said = []
    monkeypatch.setattr(native, "info_once", lambda line, *args: said.append(line % args))
    monkeypatch.setattr(native.tf.config, "list_logical_devices", lambda kind: [])
    assert native.kernels() is None
    assert re.search(f"slower: none: .*({reason})", said[-1])
    assert not any("slower" in line for line in said[:-1])
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
