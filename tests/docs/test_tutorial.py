"""The tutorial as a reader follows it: its files are saved, its commands are run, in their order.

What a page shows behind a command has to be in the command's output, line by line and in this
order; `...` stands for anything, and so does a space for several. Scripts are run by forks of a
process that has imported TensorFlow and Keras (`tests/warm.py`); the launcher runs in this one.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys

import pytest

from keras_psplus.cli import main
from keras_psplus.cluster.ports import free_ports
from tests import warm
from tests.docs import pages

TIMEOUT = 120
HOSTS = ("10.0.0.1:2222", "10.0.0.2:2222")


class Reader:
    """Somebody who follows the page in an empty folder.

    Args:
        folder: The folder.
        capfd: What captures the output of this process and its children.
    """

    def __init__(self, folder, capfd):
        self.folder, self._capfd = folder, capfd
        self._beside = []  # processes on the tutorial's machines
        ports = free_ports(len(HOSTS))
        self._addresses = {host: f"127.0.0.1:{port}" for host, port in zip(HOSTS, ports)}

    def run(self, line):
        """Runs a command line; returns what it and those beside it have printed."""
        command, *others = re.split(r"\s*\|\|\s*", line)
        code = self._run(command)
        out, err = self._capfd.readouterr()
        assert bool(code) == bool(others), f"{line} has ended with {code}:\n{out}{err}"
        # `echo` is what follows `||`.
        return out + err + "".join(shlex.split(each)[1] for each in others).replace("$?", f"{code}")

    def _run(self, command):
        words = shlex.split(command)
        if words[0] == "keras-psplus":
            return main.main(words[1:])
        if words[0] == "tensorboard":
            return self._look(words)
        env = dict(os.environ)
        while words[0].startswith(("KERAS_PSPLUS_JOB_TOKEN=", "TF_CONFIG=")):
            name, _, value = words.pop(0).partition("=")
            env[name] = self._here(value) if name == "TF_CONFIG" else value
        assert words[0] == "python", command
        process = warm.Popen([sys.executable, *words[1:]], env=env, cwd=self.folder)
        if "TF_CONFIG" not in env:
            return process.wait(TIMEOUT)
        self._beside.append(process)
        if len(self._beside) < len(HOSTS):
            return None
        codes = [process.wait(TIMEOUT) for process in self._beside]
        self._beside.clear()
        return max(codes)

    def _here(self, config):
        """The configuration of a task with this machine's addresses."""
        for host, address in self._addresses.items():
            assert host in config
            config = config.replace(host, address)
        return config

    def _look(self, words):
        """Starts TensorBoard until it says where it is, and sees what is in the files."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        command = [sys.executable, "-m", "tensorboard.main", *words[1:], "--port=0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                said = next(line for line in process.stderr if "http://" in line)
            finally:
                process.terminate()
        assert "localhost" in said
        for events in (self.folder / words[-1]).rglob("*tfevents*"):
            found = EventAccumulator(str(events)).Reload()
            assert {"comm/bytes", "comm/ratio", "comm/seconds"} <= set(found.Tags()["tensors"])
        return 0

    def close(self):
        """Kills what was left running."""
        for process in self._beside:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def reader(tmp_path, monkeypatch, capfd):
    for name in ("TF_CONFIG", "KERAS_PSPLUS_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, capfd)
    yield reader
    reader.close()


def assert_shows(expected, printed):
    """Whether the lines of a page are in an output, one after the other."""
    position = 0
    for line in expected.splitlines():
        found = pages.shows(line, printed, position)
        assert found, f"no {line!r} behind what is before it in:\n{printed}"
        position = found.end()


@pytest.mark.extended
@pytest.mark.processes
def test_tutorial(reader):
    printed, file = "", None
    for block in pages.blocks(pages.TUTORIAL):
        if block.language == "file":
            file = block.text.strip()
        elif block.language == "python":
            (reader.folder / file).write_text(block.text)
        elif block.language == "text":
            assert_shows(block.text, printed)
        elif block.language == "shell" and not block.text.startswith("pip install"):
            printed = "".join(reader.run(line) for line in block.text.strip().splitlines())
    assert not reader._beside


def test_what_is_not_printed_is_found_out():
    assert_shows("a ... c\nd", "a b  c and\n d")
    with pytest.raises(AssertionError):
        assert_shows("d\na", "a\nd")
