"""Files that could not be written, and that a library goes on writing to."""

import os

from keras_psplus.files import integrity


def test_what_is_still_written_to_a_file_goes_nowhere(tmp_path):
    path, other = tmp_path / "file", tmp_path / "other"
    with open(path, "w+b", buffering=0) as file, open(other, "wb", buffering=0) as kept:
        file.write(b"before")
        integrity.divert(str(path))
        # HDF5 does all of these when it closes a file.
        assert os.pwrite(file.fileno(), b"after", 6) == 5
        os.ftruncate(file.fileno(), 100)
        assert os.pread(file.fileno(), 5, 6) == b"after"
        kept.write(b"other")
    assert (path.read_bytes(), other.read_bytes()) == (b"before", b"other")


def test_a_file_that_is_not_there_or_not_open_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("whole")
    integrity.divert(str(tmp_path / "file"))
    integrity.divert(str(tmp_path / "none"))
    assert (tmp_path / "file").read_text() == "whole"
