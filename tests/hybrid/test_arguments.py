"""Arguments of `HybridStrategy` that have no meaning."""

import pytest

import keras_psplus


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"snapshot_every": 10}, "go together.*Received: snapshot_every=10, snapshot_dir=None"),
        ({"snapshot_dir": "folder"}, "go together"),
        ({"snapshot_every": 0, "snapshot_dir": "folder"}, "int from 1 up. Received: .*=0"),
        ({"snapshot_every": 2.5, "snapshot_dir": "folder"}, "int from 1 up. Received: .*=2.5"),
    ],
)
def test_snapshots_need_a_number_and_a_folder(arguments, message):
    with pytest.raises(ValueError, match=message):
        keras_psplus.HybridStrategy(**arguments)
