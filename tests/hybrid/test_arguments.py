"""Arguments that mean nothing for `HybridStrategy`, nor beside others."""

import pytest

import keras_psplus as psp
from keras_psplus.hybrid.rows import compressor_for_rows
from tests.support.tables import for_each

Cache = psp.tables.Cache


@for_each(
    "given, text",
    [
        (dict(prefetch=2), "`prefetch` must be True or False. Received: prefetch=2"),
        (dict(placement="ps"), "`placement` must be one of .*Received: placement="),
        (dict(placement={"*": "cpu"}), "`placement` must be one of .*Received: placement="),
        (dict(placement=3), "`placement` must be one of .*Received: placement="),
        (dict(placement=None), "`placement` must be one of .*Received: placement="),
        (dict(cache=5), "`cache` must be a `tables.Cache`, a dict from pat.*Received: "),
        (dict(cache={"*": 5}), "`cache` must be a `tables.Cache`, a dict.*Received: "),
        (dict(cache=Cache(2, 1), prefetch=True), "`prefetch=True` reads rows .* one update old"),
        (dict(reshard_after_forward=False), "`reshard_after_forward` must be.*Received: "),
        (dict(shard="weights"), "`shard` must be.*Received: "),
        (dict(shard_group=2), "`shard_group` is for `shard`.*Received: "),
        (
            dict(compression={"weights": "bf16"}),
            "are keys of `compression` with `shard`.*Received: ",
        ),
        (
            dict(shard="optimizer", compression="topk:0.1"),
            "gradients can be sent by.*Received: ",
        ),
    ],
)
def test_a_wrong_argument_is_refused(given, text):
    with pytest.raises(ValueError, match=f"(?s){text}"):
        psp.HybridStrategy(**given)


@for_each(
    "make, text",
    [
        (lambda: Cache(0, 1), "`rows` must be an int from 1 up. Received: rows=0"),
        (lambda: Cache(2.5, 1), "`rows` must be an int from 1 up. Received: rows=2.5"),
        (lambda: Cache(2, 0), "`staleness` must be an int from 1 up. Received: staleness=0"),
        (lambda: psp.layers.DynamicEmbedding(2, cache=5), "`cache` must be a `tables.Cache`, or"),
    ],
)
def test_what_is_no_cache_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@for_each("value", ["topk:0.1", "sign", "powersgd:2"])
def test_what_leaves_out_parts_of_rows_is_refused(value):
    with pytest.raises(ValueError, match="`pull_compression` must keep .*Received: "):
        compressor_for_rows("pull_compression", value)


@for_each("argument", ["row_compression", "pull_compression"])
def test_what_is_unknown_is_told_what_serves_rows(argument):
    message = f"^`{argument}` must be None, \"bf16\", .* Received: {argument}='gzip'$"
    with pytest.raises(ValueError, match=message) as error:
        compressor_for_rows(argument, "gzip")
    assert "topk" not in str(error.value) and "powersgd" not in str(error.value)


def test_one_process_has_nothing_to_cut():
    assert psp.HybridStrategy(shard="all").num_replicas_in_sync == 1
