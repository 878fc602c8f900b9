"""Small files that are replaced as a whole."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from keras_psplus.files.replace import replace
from tests.support.jobs import WITHOUT_TENSORFLOW
from tests.support.tables import for_each

SCRIPT = f"""{WITHOUT_TENSORFLOW}
from keras_psplus.files.replace import replace
replace(sys.orig_argv[-1], b"new")
assert "tensorflow" not in sys.modules
"""


@for_each("is_durable", [True, False])
def test_a_file_takes_the_place_of_another(tmp_path, is_durable):
    path = tmp_path / "list.json"
    for content in (b"old", b"new"):
        replace(path, content, is_durable)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_an_error_leaves_what_was_there(tmp_path, monkeypatch, name):
    path = tmp_path / "list.json"
    replace(path, b"old")

    def fail(*args):
        raise OSError("full")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="full"):
        replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]


def test_paths_that_only_tensorflow_reaches():
    tf.io.gfile.makedirs("ram://replaced")
    for content in (b"old", b"new"):
        replace("ram://replaced/list.json", content)
    with tf.io.gfile.GFile("ram://replaced/list.json", "rb") as file:
        assert file.read() == b"new"
    assert tf.io.gfile.listdir("ram://replaced") == ["list.json"]


def test_a_local_file_needs_no_tensorflow(tmp_path):
    command = [sys.executable, "-c", SCRIPT, tmp_path / "list.json"]
    subprocess.run(command, check=True)
