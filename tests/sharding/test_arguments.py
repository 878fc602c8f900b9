"""What `shard=` cannot be combined with is refused before anything starts."""

import pytest

import keras_psplus as psp
from keras_psplus.all_reduce import shard_option
from keras_psplus.all_reduce.topology.group_topology import Hops, Topology
from keras_psplus.compression import Int8
from tests.support.tables import for_each

RESHARD = 'must be True or False, and is for `shard="all"`'


@for_each(
    "given, text",
    [
        (dict(shard="weights"), '`shard` must be None, "optimizer", .* or "all"'),
        (dict(shard="all", compression="powersgd:4"), "gradients can be sent by .*PowerSGD"),
        (dict(shard="optimizer", compression={"*": "topk:0.01"}), "gradients can be .*TopK"),
        (dict(shard="all", compression={"weights": "sign"}), "weights can be sent by .*Sign"),
        (
            dict(shard="all", compression={"weights": "bf16", "*": None}),
            '"gradients" and "weights"',
        ),
        (dict(shard="all", shard_group=1), "`shard_group` must be an int from 2 up"),
        (dict(shard_group=2), "`shard_group` is for `shard`"),
        (dict(shard=None, compression={"weights": "bf16"}), '"weights" are keys of .*shard=None'),
        (dict(shard="all", compression={"between": "int8"}), "hops of a topology"),
        (dict(shard="optimizer", updates="local_sgd:4"), "update their weights together"),
        (dict(shard="all", topology="auto", shard_group=2), "keep all parts.*Leave one of them"),
        (dict(shard="all", reshard_after_forward=2), RESHARD),
        (dict(shard="optimizer", reshard_after_forward=False), RESHARD),
        (dict(reshard_after_forward=False), RESHARD),
    ],
)
def test_refused(given, text):
    with pytest.raises(ValueError, match=text) as error:
        psp.MultiWorkerMirroredStrategy(**given)
    assert "Received: " in str(error.value)


def test_compression_inside_groups_is_refused():
    groups, hops = Topology(((0, 1), (2, 3))), Hops(Int8(), None)
    text = "only what goes between the groups.* Received: shard='all'"
    with pytest.raises(ValueError, match=text):
        shard_option.check_topology(groups, "all", None, hops)
    shard_option.check_topology(groups, None, None, hops)


def test_several_devices_are_refused():
    with pytest.raises(ValueError, match="one device each.*Received: shard='optimizer', 2 devices"):
        shard_option.check_devices("optimizer", 2)


def test_one_process_has_nothing_to_cut():
    strategy = psp.MultiWorkerMirroredStrategy(shard="optimizer")
    assert "shard='optimizer'" in repr(strategy) and strategy.num_workers == 1


def test_units_are_layers():
    with pytest.raises(ValueError, match=r"`unit` takes a `keras.Layer`. Received: 'dense'"):
        psp.unit("dense")
